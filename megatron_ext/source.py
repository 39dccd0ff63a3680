"""Where the code that runs is from."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""The source tree, or the folder of installed packages."""


def commit() -> str | None:
    """Commit of the source tree, with a + if it has been changed; None for an installed package."""
    git = ("git", "-C", str(ROOT))
    if output(*git, "rev-parse", "--show-toplevel") != str(ROOT):
        return None
    found = output(*git, "rev-parse", "HEAD")
    return f"{found}+" if found and output(*git, "status", "--porcelain") else found


def output(*command: str) -> str | None:
    """First line that a command prints; None if it fails or is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
