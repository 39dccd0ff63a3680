"""Files of a report in a folder, which replace those of an earlier one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from megatron_ext.files import read_regular, write_whole
from megatron_ext.json_text import parse_json
from megatron_ext.paths import path_within


def replace_files(
    output: Path,
    files: Mapping[str, bytes],
    record: str,
    ours: re.Pattern[str],
    *,
    others: Collection[str] = (),
    keep: Path | None = None,
) -> None:
    """Write files, each whole, and remove those that the report before has written and this one has not.

    A folder in `output` that is empty then goes, too.

    Args:
        output: folder; made if it is not there.
        files: content by name.
        record: name of a JSON file whose `files` are the names that the report before has written.
        ours: what names of ours look like: nothing else is removed, whatever the record says.
        others: names that this report has, too, and that something else writes; with the folder, as in the record.
        keep: a file that stays.

    Raises:
        OSError: the folder cannot be written.
        UserError: the report before is said to have written files elsewhere.
    """
    output.mkdir(parents=True, exist_ok=True)
    for name in sorted(_earlier(output / record, ours) - set(files) - set(others)):
        path = path_within(output, name, str(output / record))
        if keep is None or path.resolve() != keep.resolve():
            _remove(output, path)
    for name, content in files.items():
        write_whole(output / name, content)


def _remove(output: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    if path.parent != output and path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _earlier(record: Path, ours: re.Pattern[str]) -> set[str]:
    try:
        names = parse_json(read_regular(record))["files"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()
    listed = names if isinstance(names, list) else []
    return {name for name in listed if isinstance(name, str) and ours.fullmatch(name)}
