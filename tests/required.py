"""Programs that a machine may lack: a developer's tests skip what needs them, and those of CI fail."""

from __future__ import annotations

import os

VARIABLE = "SELECTRON_REQUIRED"


def unless_required(name: str, reason: str) -> str:
    """Why something is not there, for a test that skips; empty if it is.

    Args:
        name: as SELECTRON_REQUIRED has it, names with commas between them.
        reason: why; empty if it is there.

    Raises:
        RuntimeError: it is not there, and SELECTRON_REQUIRED names it.
    """
    if reason and name in os.environ.get(VARIABLE, "").split(","):
        raise RuntimeError(f"{reason}; {VARIABLE} asks for {name}")
    return reason
