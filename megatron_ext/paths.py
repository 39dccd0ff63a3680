"""Paths that come from the text of a file: manifests, indices, sweeps and checkpoints may be written by strangers."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from megatron_ext.errors import UserError
from megatron_ext.printable import control_characters, printable

MAX_NAME_BYTES = 255
"""Bytes of one component of a path, as Linux file systems have it."""

MAX_PATH_BYTES = 1024
"""Bytes of a whole relative path; no prepared folder or checkpoint comes near."""

_DRIVE = re.compile(r"[A-Za-z]:")


def check_text(where: str, text: str) -> None:
    """Refuse control characters in a name or path of the user's: a newline ends a directive in a batch script.

    Args:
        where: option or field, for the message.
        text: its value.

    Raises:
        UserError: there are some.
    """
    if found := control_characters(text):
        shown = printable(repr(text)) if len(text) <= 100 else printable(repr(text[:100])) + "..."
        raise UserError(where, f"{shown} holds the control character {found[0]!a}", "give it without")


def relative_name(name: object, where: str) -> str:
    """Check the text of a path that must lie below some folder; the file system is not looked at.

    Args:
        name: as a file has it.
        where: file, and field in it, that the name was read from; for the message.

    Returns:
        The name without `.` components and doubled slashes.

    Raises:
        UserError: it is no text, is empty or too long, is absolute or holds `..`, a backslash, a drive, an address
            (`://`) or control characters.
    """
    problem = _problem(name)
    if problem is not None:
        shown = printable(repr(name))
        shown = shown if len(shown) <= 120 else f"{shown[:120]}..."
        raise UserError(where, f"names {shown}, which {problem}", "use files of a source that you trust")
    return PurePosixPath(str(name)).as_posix()


def path_within(folder: Path, name: object, where: str, *, follow_links: bool = False) -> Path:
    """The path of a file below a folder, from a name that some file gives.

    Args:
        folder: the name is relative to it; it may itself be reached by links, and need not exist.
        name: as a file has it.
        where: file, and field in it, that the name was read from; for the message.
        follow_links: also accept a name that is there as a link out of the folder. Only for files that are read alone,
            and whose content is checked: caches of downloaded files are folders of such links.

    Raises:
        UserError: see `relative_name`; or a link on the way leads out of the folder.
    """
    path = folder / relative_name(name, where)
    if not follow_links and not path.resolve().is_relative_to(folder.resolve()):
        problem = f"names {printable(str(path))}, where a link leads out of {printable(str(folder))}"
        raise UserError(where, problem, "put the file itself there, or remove the link")
    return path


def _problem(name: object) -> str | None:
    """The reason why a name is refused; None where it is good."""
    if not isinstance(name, str):
        return "is no text"
    if not PurePosixPath(name).parts:
        return "is empty"
    if control_characters(name):
        return "holds control characters"
    if name.startswith(("/", "~")) or _DRIVE.match(name) or "://" in name:
        return "is no relative path"
    if "\\" in name:
        return "holds a backslash"
    if ".." in PurePosixPath(name).parts:
        return "leads out of its folder"
    if len(name.encode()) > MAX_PATH_BYTES or any(len(p.encode()) > MAX_NAME_BYTES for p in PurePosixPath(name).parts):
        return "is too long"
    return None
