"""Programs that a machine may lack: tests that need them are skipped locally and fail in CI."""

from __future__ import annotations

import os

VARIABLE = "SELECTRON_REQUIRED"


def unless_required(name: str, reason: str) -> str:
    """Return the reason to skip a test, or "" if the requirement is met.

    Args:
        name: name of the requirement in SELECTRON_REQUIRED, a comma-separated list.
        reason: reason why the requirement is not met; empty if it is.

    Raises:
        RuntimeError: the requirement is not met, and SELECTRON_REQUIRED names it.
    """
    if reason and name in os.environ.get(VARIABLE, "").split(","):
        raise RuntimeError(f"{reason}; {VARIABLE} asks for {name}")
    return reason
