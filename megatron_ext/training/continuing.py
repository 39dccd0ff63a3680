"""Permitted differences between a run and the checkpoint it continues from, for `--resume` and `run.branch_from`.

The checkpoint's record contains the configuration and data it was made with. A difference that does not affect the
completed steps is printed. Any other difference is an error that names the field, unless the user allowed it by name.
An allowed difference is recorded, so that reports can mention it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.folder import RECORD, Record
from megatron_ext.config.effects import Change, Effect, changes, flat, is_field
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.validate import show
from megatron_ext.data.identity import describe_differences
from megatron_ext.runs.identity import CHANGED, DATA, FIELDS, TOKENIZER, TRAIN_DOMAINS, check_identity
from megatron_ext.training.domain_synonyms import known_domains, remove_synonyms
from megatron_ext.training.recorded_fields import describe_other_rate, mixer_defaults, recorded_fields
from megatron_ext.training.records import RunRecords
from megatron_ext.training.resilience.decisions import ALLOWED_CHANGE, record_decision
from megatron_ext.utils.errors import UserError

ALLOW, ALLOW_DATA = "run.allow_changed", "run.allow_other_data"
TEXT = "data"
"""Field name under which a change of the training text is recorded."""

_BRANCH = "run.branch_from"
_UNREPORTED_FIELDS = {"run.dir", "run.name", _BRANCH, ALLOW, ALLOW_DATA}
"""Fields whose changes are not printed: the run's location, its origin and the permissions themselves."""

_MEANINGS = {
    Effect.NOTHING: "the losses are not affected",
    Effect.MEASURED: "evaluations are affected from this step on, training is not",
    Effect.FUTURE: "only later steps are affected",
    Effect.SCHEDULE: "the learning rates of the completed steps are the same, those of later steps are affected",
}


@dataclass(frozen=True)
class CheckpointChanges:
    """Differences between a run and the checkpoint that it continues from.

    Attributes:
        messages: lines to print.
        allowed: allowed changes that affect the completed steps or the data: step, field, before and after.
        recorded: changes listed in the checkpoint's record, followed by `allowed`.
    """

    messages: Sequence[str] = ()
    allowed: Sequence[dict[str, Any]] = ()
    recorded: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True)
class Continuation:
    """Run that will continue from a checkpoint.

    Attributes:
        config: checked configuration with derived fields.
        identity: identity of the run, see `runs.identity`; None if the data was not opened, and is not compared.
        is_branch: True if the checkpoint belongs to another run.
    """

    config: RunConfig
    identity: Mapping[str, Any] | None
    is_branch: bool = False

    def compare(self, record: Record, checkpoint: Path) -> CheckpointChanges:
        """Compare the run with a checkpoint.

        Args:
            record: record of the checkpoint.
            checkpoint: folder of the checkpoint.

        Raises:
            DamagedCheckpoint: an entry of the checkpoint's record is malformed.
            UserError: the model, the training of the completed steps or the training text differs, and the difference
                was not allowed.
        """
        check_identity(record.identity, checkpoint / RECORD)
        step = record.progress.step
        after = flat(self.config)
        before, is_complete = recorded_fields(record.identity, checkpoint, step)
        if not is_complete:  # unknown fields count as unchanged
            before = {**after, **before}
        found = changes(before, after, mixer_defaults(after))
        found = remove_synonyms(found, record.identity, self.identity or known_domains(self.config, record.identity))
        rate = describe_other_rate(found, before, after, step)
        self._reject_changes(found, rate, checkpoint)
        if self.is_branch:
            self._reject_changed_trunk(record, checkpoint)
        other_text = self._check_text(record, checkpoint, found)
        messages = self._messages(found, rate is not None, record, is_complete)
        allowed = [
            {"step": step, "field": change.field, "before": change.before, "after": change.after}
            for change in found
            if _affects_completed_steps(change, rate)
        ]
        allowed += [{"step": step, "field": TEXT, "before": None, "after": text} for text in other_text]
        return CheckpointChanges(messages, allowed, [*record.identity.get(CHANGED, ()), *allowed])

    def _reject_changes(self, found: Sequence[Change], rate: str | None, checkpoint: Path) -> None:
        """Reject changes of the model, and changes of the completed steps that are not allowed by name."""
        allowed = self.config.run.allow_changed
        model_changes = [change for change in found if change.effect is Effect.MODEL]
        past_changes = [
            change for change in found if _affects_completed_steps(change, rate) and change.field not in allowed
        ]
        if not model_changes and not past_changes:
            return
        first, *others = [*model_changes, *past_changes]
        problem = f"{show(first.after)}, but the checkpoint {checkpoint} has {show(first.before)}"
        if first.effect is Effect.SCHEDULE:
            problem += f": {rate}"
        if others:
            more = ", ".join([*map(_format_change, others[:4]), *(["..."] if others[4:] else [])])
            problem += f" (and {len(others)} more: {more})"
        hint = "use the same value to continue, or another run.name to start a new run"
        if self.is_branch:
            advice = "branch off before the rate decays" if first.effect is Effect.SCHEDULE else "use the same value"
            hint = f"{advice}, or train from the beginning without run.branch_from"
        if not model_changes:
            fields = ", ".join([*allowed, *(change.field for change in past_changes)])
            hint += f"; or {ALLOW}=[{fields}] to continue anyway"
        raise UserError(first.field, problem, hint)

    def _reject_changed_trunk(self, record: Record, checkpoint: Path) -> None:
        """Reject a trunk whose configuration changed while it trained, unless the change is allowed by name.

        A run trained from scratch could not reach such a checkpoint.
        """
        allowed = self.config.run
        for change in record.identity.get(CHANGED, ()):
            if change["field"] == TEXT:
                before, hint, is_allowed = "its text was different", f"{ALLOW_DATA}=true", allowed.allow_other_data
            else:
                before = f"{change['field']} was {show(change['before'])}"
                hint, is_allowed = f"{ALLOW}=[{change['field']}]", change["field"] in allowed.allow_changed
            if not is_allowed:
                problem = f"{checkpoint} was not trained with one configuration"
                problem += f": until step {change['step']}, {before}"
                raise UserError("run.branch_from", problem, f"branch off before it, or add {hint}")

    def _check_text(self, record: Record, checkpoint: Path, found: Sequence[Change]) -> list[str]:
        """Return the differences of the training text, after checking that they are allowed."""
        before = record.identity
        if self.identity is None:
            return []
        if before.get(TOKENIZER) not in (None, self.identity[TOKENIZER]):
            problem = (
                f"{self.config.data.path} was prepared with another tokenizer (sha256 "
                f"{self.identity[TOKENIZER][:12]}) than the training data of {checkpoint} "
                f"({before[TOKENIZER][:12]})"
            )
            hint = "use the original data to continue, or another run.name to start a new run"
            raise UserError("data.path", problem, hint)
        other = self._text_differences(before, found)
        if other and not self.config.run.allow_other_data:
            more = f" (and {len(other) - 3} more)" if len(other) > 3 else ""
            problem = f"{self.config.data.path} contains different training text than {checkpoint} was trained on: "
            hint = f"use the original data, or {ALLOW_DATA}=true to continue with this data"
            raise UserError("data.path", problem + "; ".join(other[:3]) + more, hint)
        return other

    def _text_differences(self, before: Mapping[str, Any], found: Sequence[Change]) -> list[str]:
        assert self.identity is not None
        names = before.get(TRAIN_DOMAINS), self.identity[TRAIN_DOMAINS]
        if not before.get(DATA):
            if names[0] is None or names[0] == names[1] or any(change.field == TRAIN_DOMAINS for change in found):
                return []
            return [f"its domains are {', '.join(names[1])} instead of {', '.join(names[0])}"]
        old, new = before[DATA], self.identity[DATA]
        if any(change.field == TRAIN_DOMAINS for change in found):  # only common domains must match
            common = set(names[0] or ()) & set(names[1])
            old, new = (
                {"texts": [text for text in record["texts"] if text["domain"] in common]} for record in (old, new)
            )
            return describe_differences(old, new, "train")
        if old["train"] == new["train"]:
            return []
        return describe_differences(old, new, "train") or ["its domains are in a different order"]

    def _messages(
        self, found: Sequence[Change], affects_completed_steps: bool, record: Record, is_complete: bool
    ) -> list[str]:
        lines, step = [], record.progress.step
        unknown = [name for name in record.identity.get(FIELDS, ()) if not is_field(name)]
        if unknown:
            lines.append(
                "selectron: warning: the checkpoint was written by another version. This version does not have "
                f"{', '.join(unknown)}, and did not compare it"
            )
        for effect, meaning in _MEANINGS.items():
            if effect is Effect.SCHEDULE and affects_completed_steps:
                continue
            reported = [
                change for change in found if change.effect is effect and change.field not in _UNREPORTED_FIELDS
            ]
            if reported and not (self.is_branch and effect is Effect.NOTHING):
                lines.append(
                    f"selectron: changed at step {step}: {', '.join(map(_format_change, reported))}: {meaning}"
                )
        if self.identity is None:
            return lines
        before = record.identity.get(DATA)
        if not before:
            lines.append(
                "selectron: warning: the checkpoint was written by an earlier version and does not record its training "
                "text: only the names of its domains and its tokenizer were compared"
            )
        elif before["evaluation"] != self.identity[DATA]["evaluation"]:
            other = describe_differences(before, self.identity[DATA], "validation", "test")
            lines.append(
                f"selectron: warning: the evaluation text differs from that before step {step}: "
                f"{'; '.join(other[:3])}: losses by domain before and after are not comparable"
            )
        if not is_complete:
            lines.append(
                "selectron: warning: the checkpoint was written by an earlier version, and its run has no "
                "configuration file: only its model, sequence length, seed and precision were compared"
            )
        return lines


def print_changes(found: CheckpointChanges, records: RunRecords | None) -> None:
    """Print on the first rank how a run differs from its checkpoint, and record the allowed changes in decisions.jsonl.

    Args:
        found: result of `Continuing.compare`.
        records: records of the run; None except on the first rank.

    Raises:
        UserError: decisions.jsonl cannot be written.
    """
    if records is None:
        return
    for line in found.messages:
        records.print_line(line)
    for change in found.allowed:
        if change["field"] == TEXT:
            line = f"continued with different training text ({ALLOW_DATA}): {change['after']}"
        else:
            values = f"{show(change['after'])}, previously {show(change['before'])}"
            line = f"continued with {change['field']} {values} ({ALLOW})"
        record_decision(records, ALLOWED_CHANGE, change["step"], line, field=change["field"])


def _affects_completed_steps(change: Change, rate: str | None) -> bool:
    return change.effect is Effect.PAST or (change.effect is Effect.SCHEDULE and rate is not None)


def _format_change(change: Change) -> str:
    return f"{change.field} {show(change.before)} -> {show(change.after)}"
