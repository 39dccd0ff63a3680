"""Actions on faulty steps: compute again, skip, roll back, or stop the run; see `ResilienceConfig`."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.schema import ResilienceConfig
from megatron_ext.optim.base import RunOptimizer
from megatron_ext.parallel.agreement import gather_objects
from megatron_ext.training.records import RunRecords
from megatron_ext.training.resilience.decisions import AGAIN, ROLL_BACK, SKIP, STOP, interventions, note
from megatron_ext.training.resilience.guard import StepGuard
from megatron_ext.training.trainer import StepResult
from megatron_ext.utils.errors import UserError

MOST_NAMED = 4
"""Maximum number of ranks that a message names. decisions.jsonl lists all."""

_LOWER_RATE = "optimizer.lr lower with run.allow_changed=[optimizer.lr]"


@dataclass(frozen=True)
class Unsound:
    """Rank with a non-finite loss or gradient.

    Attributes:
        rank: global rank, followed by the host name.
        parameter: name of the parameter with the first non-finite gradient; None if the loss was not finite, or if
            gradients were not checked.
    """

    rank: str
    parameter: str | None


class Recovery:
    """Apply the configured actions to faulty steps, identically on all ranks.

    Args:
        config: actions and limits.
        folder: run folder.
        optimizer: optimizer of the run.
        store: checkpoints of the run.
        records: records of the run; None except on the first rank.
    """

    def __init__(
        self,
        config: ResilienceConfig,
        folder: Path,
        optimizer: RunOptimizer,
        store: CheckpointStore,
        records: RunRecords | None,
    ) -> None:
        self._config, self._optimizer, self._store, self._records = config, optimizer, store, records
        self._interventions, *_ = gather_objects(0 if records is None else interventions(folder))
        self.guard = StepGuard(config, self._history())
        self._suspects: list[Unsound] = []
        """Ranks of the newest faulty attempt."""

    @property
    def retries(self) -> int:
        """Number of times that a faulty step is computed again."""
        return self._config.retries

    def before_retry(self, step: int, result: StepResult) -> bool:
        """Record that a faulty step is computed again.

        Args:
            step: number of the step.
            result: result of the faulty attempt.

        Returns:
            True if the next attempt should check each gradient for non-finite values.
        """
        assert result.fault is not None
        found = self._found(result)
        self._note(AGAIN, step, f"{result.fault.problem}{_on(found)}: computed again", result, found)
        self._suspects = found
        # A non-finite loss identifies its rank without checking gradients.
        return math.isfinite(result.loss) and not math.isfinite(result.grad_norm)

    def after_retry(self, step: int, result: StepResult, attempts_left: int) -> None:
        """Record that the attempt after `before_retry` succeeded. Do nothing if it is faulty.

        Args:
            step: number of the step.
            result: result of the attempt.
            attempts_left: number of further attempts that were still allowed.
        """
        if result.fault is None:
            line = f"right when computed again: loss {result.loss:.4f}; a machine had erred{_on(self._suspects)}"
            self._note(AGAIN, step, line, result, attempts_left=attempts_left)

    def after(self, result: StepResult, before: Progress, samples: int) -> Progress:
        """Apply the configured action to a step whose last attempt is faulty.

        Args:
            result: result of the last attempt.
            before: progress of the run before the step.
            samples: number of samples per step.

        Returns:
            Progress from which the run continues.

        Raises:
            UserError: the run stops.
        """
        assert result.fault is not None
        found = self._found(result)
        action = self._config.on_nonfinite if result.fault.kind == "nonfinite" else self._config.on_spike
        if action == "stop":
            hint = f"set resilience.on_{result.fault.kind} to skip or roll_back, or {_LOWER_RATE}, and add --resume"
            raise self._stop(result, found, before, f"resilience.on_{result.fault.kind}", hint)
        self._interventions += 1
        if self._interventions > self._config.limit:
            problem = f"{self._config.limit} steps were skipped or rolled back before"
            hint = f"raise it, or {_LOWER_RATE}, and add --resume"
            raise self._stop(result, found, before, "resilience.limit", hint, problem)
        if action == "skip":
            line = f"{result.fault.problem}{_on(found)}: its samples are left out"
            self._note(SKIP, before.step + 1, line, result, found)
            self._optimizer.skip()
            if self._records is not None:
                self._records.left_out()
            return Progress(before.step + 1, before.samples + samples, before.tokens)
        return self._roll_back(result, found, before, samples)

    def _roll_back(self, result: StepResult, found: Sequence[Unsound], before: Progress, samples: int) -> Progress:
        fault = result.fault
        assert fault is not None
        self._store.wait()
        if self._store.folder.latest() is None:
            field = f"resilience.on_{fault.kind}"
            hint = "lower optimizer.lr, or set training.checkpoint_every lower, and begin again"
            raise self._stop(result, found, before, field, hint, "there is no checkpoint yet to roll back to")
        record, damages = self._store.check_newest()
        to_step, position = record.progress.step, before.samples + samples
        notes = "".join(f" ({damage.where}: {damage.problem})" for damage in damages)
        line = f"{fault.problem}{_on(found)}: rolled back to step {to_step}{notes}, and on from sample {position}"
        self._note(ROLL_BACK, before.step + 1, line, result, found, to_step=to_step, samples=position)
        self._store.load(self._optimizer, record)
        if self._records is not None:
            self._records.rewind(to_step)
        self.guard.remember(self._history())
        return Progress(to_step, position, record.progress.tokens)

    def _stop(
        self,
        result: StepResult,
        found: Sequence[Unsound],
        before: Progress,
        field: str,
        hint: str,
        more: str = "",
    ) -> UserError:
        """Return the error of a run that stops, after saving the valid state before the faulty step."""
        assert result.fault is not None
        tried = " each time that it was computed" if self._config.retries else ""
        problem = f"in step {before.step + 1} {result.fault.problem}{_on(found)}{tried}"
        self._store.wait()
        if before.step and self._store.folder.latest() != before.step:
            self._store.save(self._optimizer, before)
            self._store.wait()
        said = "; ".join(part for part in (problem, more) if part)
        self._note(STOP, before.step + 1, f"{said}: the run stops", result, found)
        return UserError(field, said, hint)

    def _found(self, result: StepResult) -> list[Unsound]:
        """Gather the ranks with a non-finite local loss or, if gradients were checked, a non-finite gradient."""
        here = None
        if not result.is_sound_here or result.nonfinite_gradient is not None:
            here = Unsound(f"{dist.get_rank()} ({socket.gethostname()})", result.nonfinite_gradient)
        of_ranks = gather_objects(None if here is None else asdict(here))
        return [Unsound(**found) for found in of_ranks if found is not None]

    def _note(
        self,
        decision: str,
        step: int,
        line: str,
        result: StepResult,
        found: Sequence[Unsound] | None = None,
        **details: Any,
    ) -> None:
        if self._records is None:
            return
        if found is not None:
            parameters = [one.parameter for one in found]
            details |= {"ranks": [one.rank for one in found], "parameters": parameters if any(parameters) else []}
        note(self._records, decision, step, line, loss=result.loss, grad_norm=result.grad_norm, **details)

    def _history(self) -> list[tuple[float, float]]:
        """Return, on every rank, loss and gradient norm of the newest steps in the first rank's records."""
        window = self._config.spike_window if self._config.on_spike != "ignore" else 0
        history, *_ = gather_objects([] if self._records is None else self._records.history(window))
        return [(loss, norm) for loss, norm in history]


def _on(found: Sequence[Unsound]) -> str:
    """Describe the ranks and parameters of a fault."""
    of_parameter: dict[str | None, list[str]] = {}
    for one in found:
        of_parameter.setdefault(one.parameter, []).append(one.rank)
    parts = []
    for parameter, ranks in of_parameter.items():
        more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
        first = "" if parameter is None else f", first in the gradient of {parameter}"
        parts.append(f" on rank {', '.join(ranks[:MOST_NAMED])}{more}{first}")
    return ";".join(parts)
