"""Validation of paths from untrusted files: manifests, indices, sweeps and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import control_characters, printable

MAX_NAME_BYTES = 255
"""Maximum size in bytes of one component of a path, as in Linux file systems."""

MAX_PATH_BYTES = 1024
"""Maximum size in bytes of a relative path, far above those of prepared folders and checkpoints."""

_DRIVE = re.compile(r"[A-Za-z]:")


def check_text(where: str, text: str) -> None:
    """Refuse control characters in a user's name or path: a newline ends a directive in a batch script.

    Args:
        where: option or field, for the message.
        text: its value.

    Raises:
        UserError: the text contains control characters.
    """
    if found := control_characters(text):
        shown = printable(repr(text)) if len(text) <= 100 else printable(repr(text[:100])) + "..."
        raise UserError(where, f"{shown} contains the control character {found[0]!a}", "remove it")


def check_relative_path(name: object, where: str) -> str:
    """Validate a path that must lie below some folder, without access to the file system.

    Args:
        name: path as read from a file.
        where: file and field that the path was read from, for the message.

    Returns:
        The path without `.` components and doubled slashes.

    Raises:
        UserError: it is not a string, is empty or too long, is absolute, or contains `..`, a backslash, a drive, a URL
            scheme (`://`) or control characters.
    """
    problem = _problem(name)
    if problem is not None:
        shown = printable(repr(name))
        shown = shown if len(shown) <= 120 else f"{shown[:120]}..."
        raise UserError(where, f"names {shown}, which {problem}", "use only files from a trusted source")
    return PurePosixPath(str(name)).as_posix()


def path_within(folder: Path, name: object, where: str, *, follow_links: bool = False) -> Path:
    """Return the path of a file below a folder, from a relative path in an untrusted file.

    Args:
        folder: base folder; it may itself be reached by symbolic links, and need not exist.
        name: path as read from a file.
        where: file and field that the path was read from, for the message.
        follow_links: True: accept symbolic links that lead out of the folder. Only for files that are read individually
            and whose content is verified: caches of downloaded files are folders of such links.

    Raises:
        UserError: see `check_relative_path`; or a symbolic link leads out of the folder.
    """
    path = folder / check_relative_path(name, where)
    if not follow_links and not path.resolve().is_relative_to(folder.resolve()):
        problem = f"names {printable(str(path))}, where a link leads out of {printable(str(folder))}"
        raise UserError(where, problem, "put the file itself there, or remove the link")
    return path


def _problem(name: object) -> str | None:
    """Return the reason why a path is refused, or None."""
    if not isinstance(name, str):
        return "is not text"
    if not PurePosixPath(name).parts:
        return "is empty"
    if control_characters(name):
        return "contains control characters"
    if name.startswith(("/", "~")) or _DRIVE.match(name) or "://" in name:
        return "is not a relative path"
    if "\\" in name:
        return "contains a backslash"
    if ".." in PurePosixPath(name).parts:
        return "leads out of its folder"
    if len(name.encode()) > MAX_PATH_BYTES or any(len(p.encode()) > MAX_NAME_BYTES for p in PurePosixPath(name).parts):
        return "is too long"
    return None
