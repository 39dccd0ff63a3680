"""Training steps to time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import numpy as np
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.bench.train.plain_megatron import build_plain
from megatron_ext.bench.train.profiler_ranges import profiler_range
from megatron_ext.bench.train.step_trace import DATA
from megatron_ext.config.layout import layout_of
from megatron_ext.config.schema import RunConfig
from megatron_ext.data.datasets import packing_from_config, step_batches
from megatron_ext.data.samples import TrainingSamples
from megatron_ext.model.shape import model_shape
from megatron_ext.platform.device import Platform
from megatron_ext.training.build import build_trainer
from megatron_ext.training.trainer import StepResult, Trainer


class RandomSamples:
    """Random tokens from a seed, with the interface of training samples.

    Args:
        seq_length: tokens per sample.
        vocabulary: vocabulary size.
    """

    def __init__(self, seq_length: int, vocabulary: int) -> None:
        self.seq_length, self._vocabulary = seq_length, vocabulary

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the tokens [seq_length + 1] of a sample."""
        return np.random.default_rng(index).integers(0, self._vocabulary, self.seq_length + 1)

    def document_starts(self, index: int) -> np.ndarray:
        """Return a single document start, as a sample is one document."""
        return np.zeros(1, dtype=np.int64)


class TimedRun:
    """Run whose steps are timed. Every method is a collective call.

    Args:
        config: of the run.
        vocabulary: vocabulary size of the model.
        groups: process groups.
        platform: of this process.
        samples: training samples; None: random tokens that are generated on the fly.
        plain: use megatron-core's own model; see `plain_megatron`.

    Attributes:
        shape: from which the model was built.
        trainer: executes the steps.
        samples: training samples.
        step: number of completed steps.
    """

    def __init__(
        self,
        config: RunConfig,
        vocabulary: int,
        groups: ProcessGroupCollection,
        platform: Platform,
        samples: TrainingSamples | None = None,
        *,
        plain: bool = False,
    ) -> None:
        self._config, self._groups, self._platform = config, groups, platform
        self.shape = model_shape(config, platform, vocabulary)
        self.trainer: Trainer = (build_plain if plain else build_trainer)(config, self.shape, groups, platform)
        random = cast(TrainingSamples, RandomSamples(config.data.seq_length, vocabulary))
        self.samples = random if samples is None else samples
        self.step = 0

    def train(self) -> StepResult:
        """Do one step, from reading its samples to the update."""
        training, groups = self._config.training, self._groups
        with profiler_range(DATA):
            batches = step_batches(
                self.samples,
                self.step * training.global_batch_size,
                training,
                layout_of(self._config, dist.get_world_size()),
                dp_rank=groups.dp.rank(),
                cp_rank=groups.cp.rank(),
                cp_size=groups.cp.size(),
                packing=packing_from_config(self._config.data),
            )
        result = self.trainer.train_step(batches)
        self.step += 1
        return result

    def time_call(self, function: Callable[[], object]) -> float:
        """Call a function on all ranks at the same time, and return the seconds until all have finished."""
        dist.barrier()
        started = time.perf_counter()
        function()
        self._platform.synchronize()
        dist.barrier()
        return time.perf_counter() - started
