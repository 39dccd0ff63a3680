"""Reader of a run's files that records a damaged file as a problem and still reads the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError

T = TypeVar("T")

READ_ERRORS = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""Exceptions raised on reading a file that does not exist, is not a regular file or has invalid content."""


class FileReader:
    """Read files, and collect problems instead of raising exceptions.

    Attributes:
        problems: one line per problem, which begins with the file.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    def get(self, path: Path, read: Callable[[], T], default: T) -> T:
        """Return the result of a function that reads a file, or a default if it fails.

        Args:
            path: path of the file, for the message.
            read: function that reads the file.
            default: result if the file cannot be read.
        """
        try:
            return read()
        except UserError as error:
            self.problems.append(f"{error.where}: {error.problem}")
        except READ_ERRORS as error:
            self.problems.append(f"{path}: {describe_read_error(error)}")
        return default


def describe_read_error(error: BaseException) -> str:
    """Describe in a few words why a file could not be read."""
    if isinstance(error, OSError):
        return f"cannot be read ({os_error_reason(error)})"
    if isinstance(error, UnicodeDecodeError):
        return "is damaged (not UTF-8)"
    return f"is damaged ({type(error).__name__}: {' '.join(str(error).split())[:100]})"
