"""Output files of a report, which replace those of an earlier report."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.untrusted_paths import path_within


def replace_files(
    output: Path,
    files: Mapping[str, bytes],
    record_name: str,
    pattern: re.Pattern[str],
    *,
    others: Collection[str] = (),
    keep: Path | None = None,
) -> None:
    """Write files atomically, and remove files of the earlier report that the new one does not have.

    Subfolders of `output` that become empty are removed.

    Args:
        output: folder; created if it does not exist.
        files: content by name.
        record_name: name of a JSON file whose field `files` lists the files of the earlier report.
        pattern: pattern of the names that a report may have. No other file is removed, even if the record lists it.
        others: names of files of the new report that are written elsewhere, relative to `output`. They are not removed.
        keep: a file that is never removed.

    Raises:
        OSError: the folder cannot be written.
        UserError: the record lists a file outside `output`.
    """
    output.mkdir(parents=True, exist_ok=True)
    for name in sorted(_read_record(output / record_name, pattern) - set(files) - set(others)):
        path = path_within(output, name, str(output / record_name))
        if keep is None or path.resolve() != keep.resolve():
            _remove(output, path)
    for name, content in files.items():
        write_atomically(output / name, content)


def _remove(output: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    if path.parent != output and path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _read_record(record: Path, pattern: re.Pattern[str]) -> set[str]:
    try:
        names = parse_json(read_regular(record))["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str) and pattern.fullmatch(name)}
