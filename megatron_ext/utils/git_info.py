"""Location and version of the running source code."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Source tree, or the folder of installed packages."""


def commit() -> str | None:
    """Return the commit of the source tree, with a + if it has changes; None for an installed package."""
    git = ("git", "-C", str(ROOT))
    if first_output_line(*git, "rev-parse", "--show-toplevel") != str(ROOT):
        return None
    commit_hash = first_output_line(*git, "rev-parse", "HEAD")
    return f"{commit_hash}+" if commit_hash and first_output_line(*git, "status", "--porcelain") else commit_hash


def first_output_line(*command: str) -> str | None:
    """Return the first line that a command prints; None if it fails or does not exist."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(result.stdout.splitlines()), None)
