"""Parameters and FLOPs per token of whole configurations, equal to what their runs report.

A model is built on the meta device in a separate process. That process sees no GPU, so it allocates no GPU memory. The
environment variables that it sets for torch and Megatron do not affect runs launched from the parent process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from types import TracebackType
from typing import Any

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.planning.vocabulary import vocab_size
from megatron_ext.utils import gc_control


@dataclass(frozen=True)
class ModelCounts:
    """Counts of a whole model, independent of the layout.

    Attributes:
        parameters: number of all parameters, as in a run's model.json.
        flops_per_token: model FLOPs of forward and backward pass, as MFU counts them.
    """

    parameters: int
    flops_per_token: float


class ModelCounter:
    """Cached parameter and FLOP counter. As a context manager, it stops its worker process on exit.

    Args:
        vocab_size: function that returns the vocabulary size for `data.path` and `data.cache_dir`.
    """

    def __init__(self, vocab_size: Callable[[str, str | None], int] = vocab_size) -> None:
        self._vocab_size = cache(vocab_size)
        self._counts: dict[str, ModelCounts] = {}
        self._process: ProcessPoolExecutor | None = None

    def __enter__(self) -> ModelCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.shutdown()

    def __call__(self, config: RunConfig) -> ModelCounts:
        """Count the parameters and FLOPs of a checked configuration's model.

        Raises:
            UserError: the data, which determines the vocabulary size, is not available on this machine.
        """
        model, vocab_size = _model_config(config), self._vocab_size(config.data.path, config.data.cache_dir)
        key = json.dumps([vocab_size, asdict(model)], sort_keys=True)
        if key not in self._counts:
            if self._process is None:
                self._process = process_pool(1)
            self._counts[key] = self._process.submit(_count_model, model, vocab_size).result()
        return self._counts[key]


def _model_config(config: RunConfig) -> RunConfig:
    """Return a configuration with only the fields that determine size and cost; the others are defaults."""
    used_mixers = set(parse_pattern(config.model.pattern))
    mixers = {name: fields for name, fields in config.mixers.items() if name in used_mixers}
    return RunConfig(model=config.model, mixers=mixers, data=DataConfig(path="", seq_length=config.data.seq_length))


def process_pool(max_workers: int | None = None) -> ProcessPoolExecutor:
    """Return a pool of processes for building models on the meta device, by default one per processor."""
    num_cpus = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(
        min(num_cpus, max_workers or num_cpus), mp_context=context, initializer=_initialize_worker
    )


def _initialize_worker() -> None:
    """Hide GPUs, disable compilation, silence warnings that only matter in training, and import Megatron."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    warnings.simplefilter("ignore")
    gc_control.set_process_owned(True)
    with gc_control.frozen_imports():
        resolve_name("megatron_ext.platform.device:prepare_megatron_import")()
        import_module("megatron_ext.planning.weightless")


def _count_model(*model: Any) -> ModelCounts:
    # Resolved by name, so that only the worker process imports torch.
    counts: ModelCounts = resolve_name("megatron_ext.planning.weightless:count")(*model)
    return counts
