"""Check that the import name `kernels` belongs to this project. Hugging Face has a distribution of the same name.

The module uses the standard library only and imports no sibling. It must work before selectron is installed
(`python -m kernels.name_conflict` in the source tree) and when another package shadows this one (run or load the file
by its path). The exit code is 0 if the name is ours or free, and 2, with one line on stderr, if another package owns
it.
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
    """Another distribution provides the import name `kernels`. The one-line message names it and the fix."""


def foreign_distributions(path: Iterable[str] | None = None) -> list[str]:
    """Find the installed distributions, other than selectron, that provide the top-level name `kernels`.

    Args:
        path: directories to look in; None means `sys.path`.

    Returns:
        Distribution names, sorted, each once.
    """
    found = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    # Some wheels have damaged or empty metadata. A distribution without a name is identified by its location.
    names = {_name(dist) for dist in found if _provides(dist)}
    return sorted(name for name in names if _normalised(name) != OUR_DISTRIBUTION)


def find_conflict(path: Iterable[str] | None = None) -> str | None:
    """Return one line that names the other owner of the import name `kernels` and the fix; None if there is none.

    Args:
        path: directories to look in for distributions; None means `sys.path`.
    """
    foreign = foreign_distributions(path)
    if foreign:
        owner = f"the installed distribution{'s' if len(foreign) > 1 else ''} {', '.join(map(repr, foreign))}"
        hint = f"run `pip uninstall {' '.join(foreign)}`, then install selectron (again, if it was installed)"
        return f"{owner} also provides the Python package '{IMPORT_NAME}', which is selectron's: {hint}"
    shadow = _find_shadow()
    if shadow is not None:
        hint = f"remove {_import_folder(shadow)} from PYTHONPATH, or rename the package"
        return f"'import {IMPORT_NAME}' finds {shadow} before selectron's package of that name: {hint}"
    return None


def check_ownership(path: Iterable[str] | None = None) -> None:
    """Raise unless the import name `kernels` belongs to this project.

    Args:
        path: directories to look in for distributions; None means `sys.path`.

    Raises:
        ForeignKernelsError: another package provides `kernels`; the message is that of `find_conflict`.
    """
    message = find_conflict(path)
    if message is not None:
        raise ForeignKernelsError(message)


def main() -> int:
    """Print the conflict, if any, to stderr. Return the exit code: 0, or 2 if another package owns the name."""
    message = find_conflict()
    if message is None:
        return 0
    print(f"error: {message}", file=sys.stderr)
    return 2


def _name(dist: metadata.Distribution) -> str:
    # Older Pythons return None for a missing field, newer ones may raise or have no metadata at all.
    fields = dist.metadata
    return (fields["Name"] if fields is not None and "Name" in fields else None) or str(dist.locate_file(IMPORT_NAME))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _provides(dist: metadata.Distribution) -> bool:
    # Compare the name as well: an editable install lists only a .pth file, not its packages.
    if _normalised(_name(dist)) == IMPORT_NAME:
        return True
    if IMPORT_NAME in (dist.read_text("top_level.txt") or "").split():
        return True
    # Search the raw text: `dist.files` and `packages_distributions` stat every file in newer Python versions.
    record = dist.read_text("RECORD") or ""
    return re.search(rf'^"?{IMPORT_NAME}(/|\.py,|\.[^/,]*\.so,)', record, re.MULTILINE) is not None


def _find_shadow() -> str | None:
    # Our package is recognised by this file: an installed copy elsewhere is ours, too.
    spec = importlib.util.find_spec(IMPORT_NAME)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if spec is None or any((Path(folder) / "name_conflict.py").is_file() for folder in folders):
        return None
    if spec.origin is None:  # a namespace package without __init__.py: any regular package takes precedence
        return None
    return spec.origin


def _import_folder(file: str) -> Path:
    """Return the folder of sys.path from which this module, or the `__init__.py` of a package, is imported."""
    path = Path(file)
    return path.parent.parent if path.name == "__init__.py" else path.parent


if __name__ == "__main__":
    sys.exit(main())
