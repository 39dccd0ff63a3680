"""Options `--resume` (continue from a checkpoint) and `--resume=auto` (continue if there is a checkpoint)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

AUTO = "auto"
_RESUME_AUTO = "--resume=auto"

_RESUME_AUTO_INTERNAL = "--resume-auto"
"""Internal spelling of `--resume=auto`. An argparse option with an optional value would consume the following argument,
as in `--resume training.steps=9`.
"""


def add_resume_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup, help_text: str) -> None:
    """Add `--resume` and `--resume=auto`, which set `resume` to False, True or "auto".

    Args:
        parser: a parser or argument group. Its arguments must first pass through `encode_resume_auto`.
        help_text: help text that describes the action if there is something to resume.
    """
    help_text = f"{help_text}; {_RESUME_AUTO}: or start a new run if there is none"
    parser.add_argument("--resume", action="store_const", const=True, default=False, help=help_text)
    parser.add_argument(_RESUME_AUTO_INTERNAL, dest="resume", action="store_const", const=AUTO, help=argparse.SUPPRESS)


def encode_resume_auto(arguments: Sequence[str]) -> list[str]:
    """Replace `--resume=auto` in arguments by its internal spelling."""
    return [_RESUME_AUTO_INTERNAL if argument == _RESUME_AUTO else argument for argument in arguments]
