"""Classification of save errors into storage failures and bugs, in a form that ranks can exchange."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.utils.errors import UserError

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EFBIG}
_TORCH_STORAGE_ERRORS = ("iostream error", "file write failed", "inline_container")
"""Texts in errors of torch.save's own streams. They do not name the cause."""

_MIN_FREE_BYTES = 1 << 16
"""A disk with fewer free bytes counts as full."""


class NotAsWritten(Exception):
    """Mismatch between a file and what was written into it."""


@dataclass(frozen=True)
class Failure:
    """Reason why a rank could not save its part.

    Attributes:
        problem: storage error, or the reason why nothing may be written. None: a bug.
        trace: the traceback.
        hint: advice for the user. None: free disk space.
    """

    problem: str | None
    trace: str
    hint: str | None = None

    @classmethod
    def from_error(cls, error: BaseException, folder: Path) -> Failure:
        """Classify an error raised while writing to a folder. Call it before anything is removed there."""
        if isinstance(error, UserError):
            return cls(f"{error.where} {error.problem}", "".join(traceback.format_exception(error)), error.hint)
        problem = os.strerror(errno.ENOSPC) if is_full(folder) else storage_problem(error)
        return cls(problem, "".join(traceback.format_exception(error)))


def is_full(folder: Path) -> bool:
    """Return whether the disk of a folder is nearly full. Errors of libraries on a full disk often do not say so."""
    try:
        return shutil.disk_usage(folder).free < _MIN_FREE_BYTES
    except OSError:
        return False


def storage_problem(error: BaseException | None) -> str | None:
    """Return the storage error behind an error or its causes, or None if there is none."""
    problem = None
    while error is not None:
        if isinstance(error, NotAsWritten):
            return str(error)
        for code in _STORAGE_ERRORS:  # libraries may raise an error that only quotes the message
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        if any(text in str(error) for text in _TORCH_STORAGE_ERRORS):
            problem = "the write failed; the disk may be full"  # unless a cause is more specific
        error = error.__cause__ or error.__context__
    return problem
