"""Read the files of a run where one that is damaged must not hide the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_ext.errors import UserError
from megatron_ext.files import os_reason

T = TypeVar("T")

UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What Python raises of a file that is not there, no file, or not what it must be."""


class Readings:
    """Reads files; notes a problem instead of raising it.

    Attributes:
        problems: a line for each, which begins with the file.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    def get(self, path: Path, read: Callable[[], T], default: T) -> T:
        """What a function reads from a file, or a default if it cannot.

        Args:
            path: for the message.
            read: the function.
            default: takes the place of what is damaged.
        """
        try:
            return read()
        except UserError as error:
            self.problems.append(f"{error.where}: {error.problem}")
        except UNREADABLE as error:
            self.problems.append(f"{path}: {problem_of(error)}")
        return default


def problem_of(error: BaseException) -> str:
    """Why a file could not be read, in a few words."""
    if isinstance(error, OSError):
        return f"cannot be read ({os_reason(error)})"
    if isinstance(error, UnicodeDecodeError):
        return "is damaged (not UTF-8)"
    return f"is damaged ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
