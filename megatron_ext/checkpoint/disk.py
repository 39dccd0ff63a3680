"""What a disk does wrong, told from what we do wrong, and in a form that travels between ranks."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import UserError

_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EFBIG}
_TORCH_STORAGE_ERRORS = ("iostream error", "file write failed", "inline_container")
"""What torch.save's own streams say, whatever the reason."""

_NEXT_TO_NOTHING = 1 << 16
"""Bytes free on a disk that counts as full."""


class NotAsWritten(Exception):
    """A file does not hold what was written into it."""


@dataclass(frozen=True)
class Failure:
    """Why a rank could not save its part.

    Attributes:
        problem: what the disk did, or why nothing may be written; None: it is an error of ours.
        trace: the traceback.
        hint: what the user can do, where that is not to make room; None: it is.
    """

    problem: str | None
    trace: str
    hint: str | None = None

    @classmethod
    def of(cls, error: BaseException, folder: Path) -> Failure:
        """What an error that was met while writing to a folder says; to be asked before anything is removed there."""
        if isinstance(error, UserError):
            return cls(f"{error.where} {error.problem}", "".join(traceback.format_exception(error)), error.mend)
        problem = os.strerror(errno.ENOSPC) if is_full(folder) else storage_problem(error)
        return cls(problem, "".join(traceback.format_exception(error)))


def is_full(folder: Path) -> bool:
    """Whether next to nothing can be written there: what a full disk makes libraries raise often does not say so."""
    try:
        return shutil.disk_usage(folder).free < _NEXT_TO_NOTHING
    except OSError:
        return False


def storage_problem(error: BaseException | None) -> str | None:
    """What the disk did, from an error or what it came from; None if none of them is the disk's doing."""
    problem = None
    while error is not None:
        if isinstance(error, NotAsWritten):
            return str(error)
        for code in _STORAGE_ERRORS:  # what a library raises instead may quote them
            if getattr(error, "errno", None) == code or os.strerror(code) in str(error):
                return os.strerror(code)
        if any(text in str(error) for text in _TORCH_STORAGE_ERRORS):
            problem = "the disk refuses; it may be full"  # unless what it came from says more
        error = error.__cause__ or error.__context__
    return problem
