"""Decisions of a run about faulty steps and allowed changes. Each is one line of decisions.jsonl and is printed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.run_folder.layout import DECISIONS
from megatron_ext.training.records import RunRecords
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

RETRY, SKIP, ROLL_BACK, STOP, ALLOWED_CHANGE = "again", "skip", "roll_back", "stop", "changed"


def record_decision(records: RunRecords, decision: str, step: int, line: str, **details: Any) -> None:
    """Record a decision and print it.

    Args:
        records: records of the run.
        decision: one of the constants of this module.
        step: step that the decision concerns.
        line: description of the cause and the action.
        details: further fields of the record. Numbers that are not finite become null.

    Raises:
        UserError: decisions.jsonl cannot be written.
    """
    finite_details = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in details.items()}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    records.append_record(DECISIONS, {"time": now, "step": step, "decision": decision, "line": line, **finite_details})
    records.print_line(f"selectron: warning: step {step}: {line}")


def read_decisions(folder: Path) -> list[dict[str, Any]]:
    """Return the decisions of a run in order. An incomplete last line, left by a killed run, is ignored."""
    path = folder / DECISIONS
    lines = read_regular(path).decode().split("\n")[:-1] if path.exists() else []
    return [_parse_decision(f"{path}:{number}", line) for number, line in enumerate(lines, start=1)]


def _parse_decision(where: str, line: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = parse_json(line)
        integer_fields = ("step", "to_step", "samples") if record["decision"] == ROLL_BACK else ("step",)
        if all(type(record[name]) is int for name in integer_fields):
            return dict(record)
    except (ValueError, TypeError, KeyError):
        pass
    raise UserError(where, f"is not a record of a decision: {line[:60]!r}", "repair the line or remove it")


def copy_decisions(source: Path, folder: Path, step: int) -> None:
    """Replace the decisions of a branch by those of its trunk that led to the checkpoint from which the branch starts.

    Roll-backs to `step` or a later step are not copied, nor are changes that were allowed when the trunk resumed from
    `step`.

    Args:
        source: run folder of the trunk.
        folder: run folder of the branch. Its previous decisions stem from a start that reached no checkpoint.
        step: step of the trunk's checkpoint that the branch starts from.
    """
    lines = [json.dumps(record) for record in read_decisions(source) if _is_before(record, step)]
    if lines or (folder / DECISIONS).exists():
        write_atomically(folder / DECISIONS, "".join(f"{line}\n" for line in lines).encode())


def _is_before(record: Mapping[str, Any], step: int) -> bool:
    if record["decision"] == ROLL_BACK:
        return bool(record["to_step"] < step)
    return bool(record["step"] < step or (record["step"] == step and record["decision"] in (RETRY, SKIP)))


def count_interventions(folder: Path) -> int:
    """Return the number of steps of a run that were skipped or rolled back."""
    return len({record["step"] for record in read_decisions(folder) if record["decision"] in (SKIP, ROLL_BACK)})


def resumed_progress(folder: Path, progress: Progress) -> Progress:
    """Return the progress from which a run continues at a checkpoint.

    After a roll-back to this checkpoint, samples up to the faulty step are skipped.
    """
    for record in reversed(read_decisions(folder)):
        if record["decision"] == ROLL_BACK and record["to_step"] == progress.step:
            return Progress(progress.step, max(progress.samples, record["samples"]), progress.tokens)
    return progress
