"""Options `--resume` (continue from a checkpoint) and `--resume=auto` (continue if there is a checkpoint)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

AUTO = "auto"
_RESUME_AUTO = "--resume=auto"

_OPTION = "--resume-auto"
"""Internal spelling of `--resume=auto`. An argparse option with an optional value would consume the following argument,
as in `--resume training.steps=9`.
"""


def add_resume(parser: argparse.ArgumentParser | argparse._ArgumentGroup, what: str) -> None:
    """Add `--resume` and `--resume=auto`, which set `resume` to False, True or "auto".

    Args:
        parser: a parser or argument group. Its arguments must first pass through `with_resume`.
        what: help text that describes the action if there is something to resume.
    """
    what = f"{what}; {_RESUME_AUTO}: or start a new run if there is none"
    parser.add_argument("--resume", action="store_const", const=True, default=False, help=what)
    parser.add_argument(_OPTION, dest="resume", action="store_const", const=AUTO, help=argparse.SUPPRESS)


def with_resume(words: Sequence[str]) -> list[str]:
    """Replace `--resume=auto` in arguments by its internal spelling."""
    return [_OPTION if word == _RESUME_AUTO else word for word in words]
