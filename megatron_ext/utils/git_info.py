"""Location and version of the running source code."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""Source tree, or the folder of installed packages."""


def commit() -> str | None:
    """Return the commit of the source tree, with a + if it has changes; None for an installed package."""
    git = ("git", "-C", str(ROOT))
    if output(*git, "rev-parse", "--show-toplevel") != str(ROOT):
        return None
    found = output(*git, "rev-parse", "HEAD")
    return f"{found}+" if found and output(*git, "status", "--porcelain") else found


def output(*command: str) -> str | None:
    """Return the first line that a command prints; None if it fails or does not exist."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
