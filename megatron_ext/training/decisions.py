"""What a run decided about steps that went wrong or were changed: a line each in decisions.jsonl, and said aloud."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.errors import UserError
from megatron_ext.files import read_regular, write_whole
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
    lines = read_regular(path).decode().split("\n")[:-1] if path.exists() else []
    return [_decision(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)]


def _decision(where: str, line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(line)
        numbers = ("step", "to_step", "samples") if record["decision"] == ROLL_BACK else ("step",)
        if all(type(record[name]) is int for name in numbers):
            return dict(record)
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(where, f"is no record of a decision: {line[:60]!r}", "mend the line or remove it")


def copy_decisions(source: Path, folder: Path, step: int) -> None:
    """Let the decisions of a run begin with those that a checkpoint of another run came about by.

    Args:
        source: folder of the other run.
        folder: of the run; what it decided before is of a start that did not come to a checkpoint.
        step: of the checkpoint. Of a roll-back to it or to a later one it holds nothing, and nothing of what was
            changed when the other run went on from it.
    """
    lines = [json.dumps(record) for record in read_decisions(source) if _is_before(record, step)]
    if lines or (folder / DECISIONS).exists():
        write_whole(folder / DECISIONS, "".join(f"{line}\n" for line in lines).encode())


def _is_before(record: Mapping[str, Any], step: int) -> bool:
    if record["decision"] == ROLL_BACK:
        return bool(record["to_step"] < step)
    return bool(record["step"] < step or (record["step"] == step and record["decision"] in (AGAIN, SKIP)))


def interventions(folder: Path) -> int:
    """Steps of a run that were skipped or rolled back."""
    return len({record["step"] for record in read_decisions(folder) if record["decision"] in (SKIP, ROLL_BACK)})


def place_in_data(folder: Path, progress: Progress) -> Progress:
    """Progress from a checkpoint on; a run that rolled back to it has left out samples that lie ahead of it."""
    for record in reversed(read_decisions(folder)):
        if record["decision"] == ROLL_BACK and record["to_step"] == progress.step:
            return Progress(progress.step, max(progress.samples, record["samples"]), progress.tokens)
    return progress
