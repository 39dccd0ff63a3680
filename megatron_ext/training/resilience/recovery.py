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
from megatron_ext.training.resilience.decisions import (
    RETRY,
    ROLL_BACK,
    SKIP,
    STOP,
    count_interventions,
    record_decision,
)
from megatron_ext.training.resilience.guard import StepGuard
from megatron_ext.training.trainer import StepResult
from megatron_ext.utils.errors import UserError

MAX_NAMED_RANKS = 4
"""Maximum number of ranks that a message names. decisions.jsonl lists all."""

_LOWER_RATE = "optimizer.lr lower with run.allow_changed=[optimizer.lr]"


@dataclass(frozen=True)
class NonfiniteRank:
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
        self._interventions, *_ = gather_objects(0 if records is None else count_interventions(folder))
        self.guard = StepGuard(config, self._history())
        self._suspects: list[NonfiniteRank] = []
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
        ranks = self._gather_ranks(result)
        line = f"{result.fault.problem}{_describe_ranks(ranks)}: computed again"
        self._record_decision(RETRY, step, line, result, ranks)
        self._suspects = ranks
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
            cause = f"the fault was a hardware error{_describe_ranks(self._suspects)}"
            line = f"correct when computed again: loss {result.loss:.4f}; {cause}"
            self._record_decision(RETRY, step, line, result, attempts_left=attempts_left)

    def handle_fault(self, result: StepResult, before: Progress, samples: int) -> Progress:
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
        ranks = self._gather_ranks(result)
        action = self._config.on_nonfinite if result.fault.kind == "nonfinite" else self._config.on_spike
        if action == "stop":
            hint = f"set resilience.on_{result.fault.kind} to skip or roll_back, or {_LOWER_RATE}, and add --resume"
            raise self._stop(result, ranks, before, f"resilience.on_{result.fault.kind}", hint)
        self._interventions += 1
        if self._interventions > self._config.limit:
            problem = f"{self._config.limit} steps were skipped or rolled back before"
            hint = f"raise it, or {_LOWER_RATE}, and add --resume"
            raise self._stop(result, ranks, before, "resilience.limit", hint, problem)
        if action == "skip":
            line = f"{result.fault.problem}{_describe_ranks(ranks)}: its samples are skipped"
            self._record_decision(SKIP, before.step + 1, line, result, ranks)
            self._optimizer.skip()
            if self._records is not None:
                self._records.skip_step()
            return Progress(before.step + 1, before.samples + samples, before.tokens)
        return self._roll_back(result, ranks, before, samples)

    def _roll_back(
        self, result: StepResult, ranks: Sequence[NonfiniteRank], before: Progress, samples: int
    ) -> Progress:
        fault = result.fault
        assert fault is not None
        self._store.wait()
        if self._store.folder.latest() is None:
            field = f"resilience.on_{fault.kind}"
            hint = "lower optimizer.lr, or set training.checkpoint_every lower, and begin again"
            raise self._stop(result, ranks, before, field, hint, "there is no checkpoint yet to roll back to")
        record, damages = self._store.check_newest()
        to_step, position = record.progress.step, before.samples + samples
        notes = "".join(f" ({damage.where}: {damage.problem})" for damage in damages)
        action = f"rolled back to step {to_step}{notes}, continuing from sample {position}"
        line = f"{fault.problem}{_describe_ranks(ranks)}: {action}"
        self._record_decision(ROLL_BACK, before.step + 1, line, result, ranks, to_step=to_step, samples=position)
        self._store.load(self._optimizer, record)
        if self._records is not None:
            self._records.rewind(to_step)
        self.guard.replace_history(self._history())
        return Progress(to_step, position, record.progress.tokens)

    def _stop(
        self,
        result: StepResult,
        ranks: Sequence[NonfiniteRank],
        before: Progress,
        field: str,
        hint: str,
        more: str = "",
    ) -> UserError:
        """Return the error of a run that stops, after saving the valid state before the faulty step."""
        assert result.fault is not None
        attempts = " each time that it was computed" if self._config.retries else ""
        problem = f"in step {before.step + 1} {result.fault.problem}{_describe_ranks(ranks)}{attempts}"
        self._store.wait()
        if before.step and self._store.folder.latest() != before.step:
            self._store.save(self._optimizer, before)
            self._store.wait()
        message = "; ".join(part for part in (problem, more) if part)
        self._record_decision(STOP, before.step + 1, f"{message}: the run stops", result, ranks)
        return UserError(field, message, hint)

    def _gather_ranks(self, result: StepResult) -> list[NonfiniteRank]:
        """Gather the ranks with a non-finite local loss or, if gradients were checked, a non-finite gradient."""
        local = None
        if not result.is_local_loss_finite or result.nonfinite_gradient is not None:
            local = NonfiniteRank(f"{dist.get_rank()} ({socket.gethostname()})", result.nonfinite_gradient)
        gathered = gather_objects(None if local is None else asdict(local))
        return [NonfiniteRank(**fields) for fields in gathered if fields is not None]

    def _record_decision(
        self,
        decision: str,
        step: int,
        line: str,
        result: StepResult,
        ranks: Sequence[NonfiniteRank] | None = None,
        **details: Any,
    ) -> None:
        if self._records is None:
            return
        if ranks is not None:
            parameters = [rank.parameter for rank in ranks]
            details |= {
                "ranks": [rank.rank for rank in ranks],
                "parameters": parameters if any(parameters) else [],
            }
        record_decision(self._records, decision, step, line, loss=result.loss, grad_norm=result.grad_norm, **details)

    def _history(self) -> list[tuple[float, float]]:
        """Return, on every rank, loss and gradient norm of the newest steps in the first rank's records."""
        window = self._config.spike_window if self._config.on_spike != "ignore" else 0
        history, *_ = gather_objects([] if self._records is None else self._records.history(window))
        return [(loss, norm) for loss, norm in history]


def _describe_ranks(nonfinite_ranks: Sequence[NonfiniteRank]) -> str:
    """Describe the ranks and parameters of a fault."""
    ranks_by_parameter: dict[str | None, list[str]] = {}
    for nonfinite_rank in nonfinite_ranks:
        ranks_by_parameter.setdefault(nonfinite_rank.parameter, []).append(nonfinite_rank.rank)
    parts = []
    for parameter, ranks in ranks_by_parameter.items():
        more = f" and {len(ranks) - MAX_NAMED_RANKS} more" if len(ranks) > MAX_NAMED_RANKS else ""
        first = "" if parameter is None else f", first in the gradient of {parameter}"
        parts.append(f" on rank {', '.join(ranks[:MAX_NAMED_RANKS])}{more}{first}")
    return ";".join(parts)
