"""What a run decided about steps that went wrong or were changed: a line each in decisions.jsonl, and said aloud."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.json_text import parse_json
from megatron_ext.training.records import RunRecords

DECISIONS = "decisions.jsonl"
AGAIN, SKIP, ROLL_BACK, STOP, WENT_ON = "again", "skip", "roll_back", "stop", "changed"


def note(records: RunRecords, decision: str, step: int, line: str, **details: Any) -> None:
    """Keep a decision, and say it.

    Args:
        records: of the run.
        decision: one of those above.
        step: that it is about.
        line: what happened and what is done.
        details: numbers; those that are not finite become null.

    Raises:
        UserError: the disk refuses.
    """
    numbers = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in details.items()}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    records.keep(DECISIONS, {"time": now, "step": step, "decision": decision, "line": line, **numbers})
    records.say(f"selectron: warning: step {step}: {line}")


def read_decisions(folder: Path) -> list[dict[str, Any]]:
    """Decisions of a run, in order; a line that a killed run was writing is left out."""
    path = folder / DECISIONS
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [parse_json(line) for line in lines]


def interventions(folder: Path) -> int:
    """Steps of a run that were skipped or rolled back."""
    return len({record["step"] for record in read_decisions(folder) if record["decision"] in (SKIP, ROLL_BACK)})


def place_in_data(folder: Path, progress: Progress) -> Progress:
    """Progress from a checkpoint on; a run that rolled back to it has left out samples that lie ahead of it."""
    for record in reversed(read_decisions(folder)):
        if record["decision"] == ROLL_BACK and record["to_step"] == progress.step:
            return Progress(progress.step, max(progress.samples, record["samples"]), progress.tokens)
    return progress
