"""Who owns the import name `kernels`: this project, or another distribution (Hugging Face has one of that name).

Standard library only, and no import of a sibling: it must work before selectron is installed
(`python -m kernels.ownership` in the source tree) and when another package shadows this one (run or load the file by
its path). Exit code 0: the name is ours or free; 2: somebody else's, with one line on stderr that says whose.
"""

import importlib.util
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

IMPORT_NAME = "kernels"
OUR_DISTRIBUTION = "selectron"


class ForeignKernelsError(RuntimeError):
    """Another distribution provides the import name `kernels`. The message is one line that names it and the mend."""


def foreign_distributions(path: Iterable[str] | None = None) -> list[str]:
    """Find the installed distributions, other than selectron, that provide the top-level name `kernels`.

    Args:
        path: directories to look in; None means `sys.path`.

    Returns:
        Distribution names, sorted, each once.
    """
    found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    # Some wheels' metadata is damaged or empty; a distribution without a name is told by its place instead.
    names = {_name(dist) for dist in found if _provides(dist)}
    return sorted(name for name in names if _normalised(name) != OUR_DISTRIBUTION)


def complaint(path: Iterable[str] | None = None) -> str | None:
    """Say in one line who else holds the import name `kernels` and how to mend it; None when nobody does.

    Args:
        path: directories to look in for distributions; None means `sys.path`.
    """
    foreign = foreign_distributions(path)
    if foreign:
        what = f"the installed distribution{'s' if len(foreign) > 1 else ''} {', '.join(map(repr, foreign))}"
        mend = f"run `pip uninstall {' '.join(foreign)}`, then install selectron (again, if it was installed)"
        return f"{what} also provides the Python package '{IMPORT_NAME}', which is selectron's: {mend}"
    shadow = _shadow()
    if shadow is not None:
        mend = "remove that folder from PYTHONPATH, or rename it"
        return f"'import {IMPORT_NAME}' finds {shadow} before selectron's package of that name: {mend}"
    return None


def require_ownership(path: Iterable[str] | None = None) -> None:
    """Refuse to go on when the import name `kernels` is not ours.

    Args:
        path: directories to look in for distributions; None means `sys.path`.

    Raises:
        ForeignKernelsError: with the line that `complaint` gives.
    """
    line = complaint(path)
    if line is not None:
        raise ForeignKernelsError(line)


def main() -> int:
    """Print the complaint, if any, to stderr. Returns the exit code: 0, or 2 when the name is somebody else's."""
    line = complaint()
    if line is None:
        return 0
    print(f"error: {line}", file=sys.stderr)
    return 2


def _name(dist: metadata.Distribution) -> str:
    # Older Pythons return None for a missing field, newer ones may raise or have no metadata at all.
    fields = dist.metadata
    return (fields["Name"] if fields is not None and "Name" in fields else None) or str(dist.locate_file(IMPORT_NAME))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _provides(dist: metadata.Distribution) -> bool:
    # By name too: an editable install lists a .pth file only, not the packages behind it.
    if _normalised(_name(dist)) == IMPORT_NAME:
        return True
    if IMPORT_NAME in (dist.read_text("top_level.txt") or "").split():
        return True
    # The raw text, as `dist.files` and `packages_distributions` stat each file of each distribution on new Pythons.
    record = dist.read_text("RECORD") or ""
    return re.search(rf'^"?{IMPORT_NAME}(/|\.py,|\.[^/,]*\.so,)', record, re.MULTILINE) is not None


def _shadow() -> str | None:
    # Our package is known by this very file: an installed copy of it elsewhere is ours too.
    spec = importlib.util.find_spec(IMPORT_NAME)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if spec is None or any((Path(folder) / "ownership.py").is_file() for folder in folders):
        return None
    if spec.origin is None:  # a folder without __init__.py: any real package wins over it
        return None
    return spec.origin


if __name__ == "__main__":
    sys.exit(main())
