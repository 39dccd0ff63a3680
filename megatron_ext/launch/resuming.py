"""The option `--resume` of commands: go on from a checkpoint, or `--resume=auto` where there is one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

AUTO = "auto"
_RESUME_AUTO = "--resume=auto"

_OPTION = "--resume-auto"
"""What the parser calls `--resume=auto`: an option of argparse's with a value that may be left out would take the
argument after it, `--resume training.steps=9`, for its value."""


def add_resume(parser: argparse.ArgumentParser | argparse._ArgumentGroup, what: str) -> None:
    """Add `--resume` and `--resume=auto`: `resume` is False, True or "auto".

    Args:
        parser: or a group of its arguments; its words are to go through `with_resume`.
        what: is done where there is something to resume.
    """
    what = f"{what}; {_RESUME_AUTO}: or begin where there is none"
    parser.add_argument("--resume", action="store_const", const=True, default=False, help=what)
    parser.add_argument(_OPTION, dest="resume", action="store_const", const=AUTO, help=argparse.SUPPRESS)


def with_resume(words: Sequence[str]) -> list[str]:
    """Words of a command line as `add_resume` reads them."""
    return [_OPTION if word == _RESUME_AUTO else word for word in words]
