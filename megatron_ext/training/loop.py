"""The training loop: steps, metrics, evaluations, checkpoints and graceful stop."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.layout import Layout
from megatron_ext.config.schema import TrainingConfig
from megatron_ext.data.batches import NO_PACKING, Batch, Packing
from megatron_ext.data.datasets import step_batches
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.evaluation.domains import DomainEvaluator
from megatron_ext.evaluation.during_training import SuitesBetweenSteps
from megatron_ext.parallel.agreement import raise_on_all_ranks
from megatron_ext.run_folder.heartbeat import Heartbeat
from megatron_ext.training.records import RunRecords
from megatron_ext.training.resilience.recovery import Recovery
from megatron_ext.training.resilience.stopping import StopRequest
from megatron_ext.training.resilience.stragglers import Stragglers
from megatron_ext.training.trainer import StepResult, Trainer


@dataclass(frozen=True)
class GlobalStepInfo:
    """Values of a step that all ranks agree on.

    Attributes:
        peak_memory: peak memory in bytes, the maximum over all ranks.
        is_stop_requested: True if any rank was asked to stop.
        is_saving: True if any rank is still writing a checkpoint.
        loss: loss of the step, in nats per token; nan if it is not finite.
        grad_norm: gradient norm of the step, before clipping; nan if it is not finite.
    """

    peak_memory: int
    is_stop_requested: bool
    is_saving: bool
    loss: float
    grad_norm: float


@dataclass
class TrainingLoop:
    """Training of one run from its current progress to its last step.

    Attributes:
        trainer: executes the steps.
        samples: training samples in the run's order.
        evaluator: evaluates the loss by domain.
        store: saves checkpoints.
        recovery: handles faulty steps.
        stragglers: compares the speeds of the ranks.
        heartbeat: publishes the progress of this rank.
        training: number of steps and intervals.
        layout: parallel layout.
        records: files of the run; None except on the first rank.
        flops_per_token: model FLOPs of forward and backward pass, of the whole model.
        peak_flops: peak FLOP/s of all devices together; None if unknown.
        progress: current step, samples and tokens.
        last_evaluation: step of the newest evaluation by domain in the records; 0 if there is none.
        packing: document information that the batches contain.
        suites: other suites to run between steps, or None.
        last_suites: step of the newest suite results in the records; 0 if there are none.
        seconds: durations in seconds by name: `evaluation`, `suites`, `save` (time that training waits for a
            checkpoint) and `write` (wait for the last checkpoint at the end).
    """

    trainer: Trainer
    samples: TrainingSamples
    evaluator: DomainEvaluator
    store: CheckpointStore
    recovery: Recovery
    stragglers: Stragglers
    heartbeat: Heartbeat
    training: TrainingConfig
    layout: Layout
    records: RunRecords | None
    flops_per_token: float
    peak_flops: float | None
    progress: Progress
    last_evaluation: int
    packing: Packing = NO_PACKING
    suites: SuitesBetweenSteps | None = None
    last_suites: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def run(self, stop: StopRequest) -> bool:
        """Train to the last step or until a stop is requested, and save a checkpoint in both cases.

        Returns:
            True if the run is finished.
        """
        try:
            finished = self._run(stop)
            with self._timed("write"):
                self.store.wait()
        except BaseException:
            self.store.abandon()
            raise
        return finished

    def _run(self, stop: StopRequest) -> bool:
        if self.progress.step > self.last_evaluation and self._is_due(self.training.evaluate_every, False):
            self._evaluate()  # the run was stopped before this evaluation
        if self.progress.step > self.last_suites and self._is_due(self.training.evaluate_suites_every, False):
            self._run_suites()
        while self.progress.step < self.training.steps:
            before = self.progress.step
            stop_requested = self._step(stop)
            if self.progress.step <= before:  # rolled back to a step that has been evaluated and saved
                if stop_requested:
                    break
                continue
            finished = self.progress.step == self.training.steps
            if self._is_due(self.training.evaluate_every, finished) and (finished or not stop_requested):
                self._evaluate()
            if self._is_due(self.training.evaluate_suites_every, finished) and (finished or not stop_requested):
                self._run_suites()
            if stop_requested or finished or self._is_due(self.training.checkpoint_every, False):
                self._save()
            if stop_requested:
                break
        return self.progress.step == self.training.steps

    def _save(self) -> None:
        # Every rank writes, but only the first rank holds the run's lock and can check that the run may still write.
        raise_on_all_ranks(self.store.check_writable)
        if self.records is not None:
            self.records.flush()
        with self._timed("save"):
            self.store.save(self.trainer.optimizer, self.progress)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name].append(time.perf_counter() - started)

    def _is_due(self, every: int, finished: bool) -> bool:
        return every > 0 and (self.progress.step % every == 0 or finished)

    def _evaluate(self) -> None:
        choice, is_last = self.training.evaluate_classes, self.progress.step == self.training.steps
        by_class = choice == "every" or (choice == "last" and is_last)
        with self._timed("evaluation"):
            records = self.evaluator.evaluate(self.progress.step, self.progress.tokens, by_class=by_class)
        if self.records is not None:
            self.records.evaluation(records)

    def _run_suites(self) -> None:
        assert self.suites is not None, "required by the rules of a configuration"
        with self._timed("suites"):
            records = self.suites.run(self.progress)
        if self.records is not None:
            self.records.suites(records)

    def _step(self, stop: StopRequest) -> bool:
        """Do one optimizer step and record its metrics. Return True if any rank was asked to stop."""
        started = time.perf_counter()
        batches = self._batches()
        read_seconds = time.perf_counter() - started
        step = self.progress.step + 1
        result, step_info = self._attempt(batches, stop)
        for attempts_left in reversed(range(self.recovery.retries)):
            if result.fault is None:
                break
            check_gradients = self.recovery.before_retry(step, result)
            result, step_info = self._attempt(batches, stop, check_gradients)
            self.recovery.after_retry(step, result, attempts_left)
        self.trainer.platform.synchronize()
        seconds = time.perf_counter() - started
        samples = self.training.global_batch_size
        if result.fault is None:
            self.recovery.guard.accept(result.loss, result.grad_norm)
            self.progress = Progress(step, self.progress.samples + samples, self.progress.tokens + result.tokens)
            if self.records is not None:
                self.records.step(self._metrics(result, self.trainer.optimizer.lr, seconds, step_info.peak_memory))
        else:
            self.progress = self.recovery.handle_fault(result, self.progress, samples)
        self.heartbeat.step = self.progress.step
        self.stragglers.after_step(step, read_seconds)
        if not step_info.is_saving:  # all ranks call `advance` at the same steps
            self.store.advance()
        return step_info.is_stop_requested

    def _attempt(
        self, batches: Sequence[Batch], stop: StopRequest, check_gradients: bool = False
    ) -> tuple[StepResult, GlobalStepInfo]:
        """Compute gradients, and update the parameters unless the step is faulty; see `Trainer.compute_gradients`."""
        optimizer = self.trainer.optimizer
        result = self.trainer.compute_gradients(batches, check_gradients)
        step_info = self._reduce_step_info(stop, result.loss, result.grad_norm)
        fault = self.recovery.guard.find_fault(step_info.loss, step_info.grad_norm)
        if fault is None:
            optimizer.step()
        else:
            optimizer.drop_gradients()
        return replace(result, fault=fault), step_info

    def _batches(self) -> list[Batch]:
        groups = self.trainer.groups
        return step_batches(
            self.samples,
            self.progress.samples,
            self.training,
            self.layout,
            dp_rank=groups.dp.rank(),
            cp_rank=groups.cp.rank(),
            cp_size=groups.cp.size(),
            packing=self.packing,
        )

    def _reduce_step_info(self, stop: StopRequest, loss: float, grad_norm: float) -> GlobalStepInfo:
        """Reduce all values that ranks must agree on to their maximum, in one all-reduce per step."""
        finite = [value if math.isfinite(value) else 0.0 for value in (loss, grad_norm)]
        nonfinite = [float(not math.isfinite(value)) for value in (loss, grad_norm)]
        flags = float(stop.signal_name is not None), float(self.store.is_busy)
        values = [self.trainer.platform.peak_memory_bytes(), *flags, *finite, *nonfinite]
        largest = torch.tensor(values, dtype=torch.float64, device=self.trainer.platform.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        peak, stop_requested, saving, *reduced, no_loss, no_norm = largest.tolist()
        loss, grad_norm = (math.nan if no else value for value, no in zip(reduced, (no_loss, no_norm), strict=True))
        return GlobalStepInfo(int(peak), bool(stop_requested), bool(saving), loss, grad_norm)

    def _metrics(
        self, result: StepResult, lr: float, seconds: float, peak_memory: int
    ) -> dict[str, float | int | None]:
        tokens_per_second = result.tokens / seconds
        mfu = self.flops_per_token * tokens_per_second / self.peak_flops if self.peak_flops else None
        return {
            "step": self.progress.step,
            "tokens": self.progress.tokens,
            "predicted_tokens": result.predicted,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "peak_memory": peak_memory,
        }
