"""Trial runs: their folder, and the estimate for the whole run that is derived from their steps."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megatron_ext.config.schema import RunConfig, TrainingConfig
from megatron_ext.run_folder import lock
from megatron_ext.run_folder.layout import METRICS
from megatron_ext.utils.atomic_files import os_error_reason, write_atomically
from megatron_ext.utils.errors import UserError

MARKER = "trial.json"
"""File that marks a trial's folder, which the next trial may replace. The finished trial writes its estimate there."""

_WARM_UP_STEPS = 2
"""Number of steps excluded at the start: they include compilation, allocation and autotuning."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Estimate for a whole run, measured in a trial.

    Attributes:
        steps: number of steps of the trial.
        step_seconds: median over the steps after the first two (over all if there are at most two).
        first_step_seconds: duration of the first step, including compilation.
        tokens_per_second: throughput of all devices together, at `step_seconds`.
        mfu: model FLOP/s as a fraction of the peak of all devices; None if the peak is unknown.
        peak_memory: peak memory in bytes of the rank that uses most: allocated on a GPU, resident on a CPU.
        evaluation_seconds: duration of one evaluation by domain; None without evaluations.
        suites_seconds: duration of one run of the other suites; None without suites.
        checkpoint_bytes: size of one checkpoint.
        checkpoint_seconds: time from the start of a save until the checkpoint is written.
        checkpoint_waits: part of `checkpoint_seconds` in which training waits.
        whole_seconds: duration of the whole run, with its evaluations and checkpoints.
        whole_steps: number of steps of the whole run.
        whole_tokens: number of training tokens of the whole run.
        losses: loss of each step, in nats per token.
    """

    steps: int
    step_seconds: float
    first_step_seconds: float
    tokens_per_second: float
    mfu: float | None
    peak_memory: int
    evaluation_seconds: float | None
    suites_seconds: float | None
    checkpoint_bytes: int
    checkpoint_seconds: float
    checkpoint_waits: float
    whole_seconds: float
    whole_steps: int
    whole_tokens: int
    losses: Sequence[float]


def is_trial(folder: Path) -> bool:
    """Return True if a folder belongs to a trial rather than to a run."""
    return (folder / MARKER).exists()


def prepare_folder(folder: Path) -> None:
    """Create the folder of a trial, replacing an earlier trial. Only one process may call this function.

    Raises:
        UserError: the folder cannot be removed or created.
    """
    try:
        for path in folder.iterdir() if is_trial(folder) else ():
            if path.name == lock.FOLDER:  # lock held by this process
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARKER:  # kept to mark the folder as a trial if this process is killed here
                path.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / MARKER, b"{}\n")
    except OSError as error:
        raise UserError(
            str(folder), f"cannot be written ({os_error_reason(error)})", "choose another run.dir"
        ) from error


def write_estimate(
    run_config: RunConfig, folder: Path, checkpoints: Path, seconds: Mapping[str, Sequence[float]]
) -> str:
    """Estimate the whole run, write the estimate to the trial's folder and remove its checkpoint; for one process only.

    Args:
        run_config: configuration of the whole run.
        folder: folder of the finished trial.
        checkpoints: folder of the trial's checkpoints.
        seconds: durations of evaluations and checkpoints, see `TrainingLoop.seconds`.

    Returns:
        Text to print.
    """
    metrics = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    size = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file())
    estimate = _estimate(run_config, metrics, seconds, size)
    write_atomically(folder / MARKER, (json.dumps(asdict(estimate), indent=1) + "\n").encode())
    shutil.rmtree(checkpoints)
    return _format_estimate(estimate, run_config.training, folder)


def _estimate(
    run_config: RunConfig, metrics: Sequence[Mapping[str, Any]], seconds: Mapping[str, Sequence[float]], size: int
) -> Estimate:
    training = run_config.training
    tokens = training.global_batch_size * run_config.data.seq_length
    step_seconds = [tokens / record["tokens_per_second"] for record in metrics]
    counted = step_seconds[_WARM_UP_STEPS:] or step_seconds
    median_seconds = median(counted)
    # MFU is inversely proportional to the duration of a step.
    mfu = [
        record["mfu"] * duration
        for record, duration in zip(metrics, step_seconds, strict=True)
        if record["mfu"] is not None
    ]
    evaluation, suites, waits = (_last(seconds, name) for name in ("evaluation", "suites", "save"))
    total = training.steps * median_seconds + (waits or 0.0) * _count_occurrences(
        training.steps, training.checkpoint_every or training.steps
    )
    total += (evaluation or 0.0) * _count_occurrences(training.steps, training.evaluate_every)
    total += (suites or 0.0) * _count_occurrences(training.steps, training.evaluate_suites_every)
    return Estimate(
        steps=len(metrics),
        step_seconds=median_seconds,
        first_step_seconds=step_seconds[0],
        tokens_per_second=tokens / median_seconds,
        mfu=median(mfu) / median_seconds if mfu else None,
        peak_memory=max(record["peak_memory"] for record in metrics),
        evaluation_seconds=evaluation,
        suites_seconds=suites,
        checkpoint_bytes=size,
        checkpoint_seconds=(waits or 0.0) + (_last(seconds, "write") or 0.0),
        checkpoint_waits=waits or 0.0,
        whole_seconds=total,
        whole_steps=training.steps,
        whole_tokens=tokens * training.steps,
        losses=[record["loss"] for record in metrics],
    )


def _last(seconds: Mapping[str, Sequence[float]], name: str) -> float | None:
    return seconds[name][-1] if seconds.get(name) else None


def _count_occurrences(steps: int, every: int) -> int:
    """Return how often something is done every `every` steps and at the last step; 0 if `every` is 0."""
    return math.ceil(steps / every) if every else 0


def _format_estimate(estimate: Estimate, training: TrainingConfig, folder: Path) -> str:
    after = f", median of steps {_WARM_UP_STEPS + 1} to {estimate.steps}" if estimate.steps > _WARM_UP_STEPS else ""
    rows = [("step", f"{estimate.step_seconds:.3g} s{after}; the first took {estimate.first_step_seconds:.3g} s")]
    mfu = f" ({estimate.mfu:.1%} of the peak)" if estimate.mfu is not None else ""
    rows.append(("tokens/s", f"{estimate.tokens_per_second:,.0f}{mfu}"))
    rows.append(("peak memory", f"{estimate.peak_memory / 2**30:.2f} GiB in the process with the highest use"))
    rows.append(("loss", f"{estimate.losses[0]:.4f} to {estimate.losses[-1]:.4f}"))
    if estimate.evaluation_seconds is not None:
        rows.append(("evaluation", f"{estimate.evaluation_seconds:.3g} s, every {training.evaluate_every} steps"))
    if estimate.suites_seconds is not None:
        rows.append(("suites", f"{estimate.suites_seconds:.3g} s, every {training.evaluate_suites_every} steps"))
    written = f"{estimate.checkpoint_bytes / 2**30:.2f} GiB in {estimate.checkpoint_seconds:.3g} s"
    rows.append(("checkpoint", f"{written}, training waits for {estimate.checkpoint_waits:.3g} s; removed"))
    duration = _format_duration(estimate.whole_seconds)
    summary = f"{estimate.whole_steps:,} steps, {estimate.whole_tokens:,} tokens: about {duration}"
    rows.append(("whole run", f"{summary} at this rate, plus the verification of its data"))
    rows.append(("kept in", str(folder)))
    return "\n".join(["trial finished", *(f"  {name:<13}{value}" for name, value in rows)])


def _format_duration(seconds: float) -> str:
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"
