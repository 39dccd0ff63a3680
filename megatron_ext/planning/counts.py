"""How large models are and what a token costs them, of whole configurations, as their runs will say it.

A model is built without memory, in a process of its own: it sees no GPU, so that none is taken, and what torch and
Megatron need in the environment there does not come into that of the runs which are launched from here.
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
from pkgutil import resolve_name
from types import TracebackType
from typing import Any

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import DataConfig, RunConfig
from megatron_ext.planning.vocabulary import vocab_size


@dataclass(frozen=True)
class ModelCounts:
    """A whole model, whatever its layout.

    Attributes:
        parameters: all of them, as in a run's model.json.
        flops_per_token: model FLOPs of forward and backward pass, of which mfu is a fraction.
    """

    parameters: int
    flops_per_token: float


class Counter:
    """Counts models, each once; to be used as a context manager.

    Args:
        vocab_size: of `data.path` and `data.cache_dir`, see there.
    """

    def __init__(self, vocab_size: Callable[[str, str | None], int] = vocab_size) -> None:
        self._vocab_size = cache(vocab_size)
        self._known: dict[str, ModelCounts] = {}
        self._process: ProcessPoolExecutor | None = None

    def __enter__(self) -> Counter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.shutdown()

    def __call__(self, config: RunConfig) -> ModelCounts:
        """Count the model of a configuration that is checked.

        Raises:
            UserError: its data, which say how large the vocabulary is, are not here.
        """
        model, vocab_size = _model_part(config), self._vocab_size(config.data.path, config.data.cache_dir)
        key = json.dumps([vocab_size, asdict(model)], sort_keys=True)
        if key not in self._known:
            if self._process is None:
                self._process = process_pool(1)
            self._known[key] = self._process.submit(_count, model, vocab_size).result()
        return self._known[key]


def _model_part(config: RunConfig) -> RunConfig:
    """What a model's size and cost follow from; all else is as it is by default, so that it makes no difference."""
    used = set(parse_pattern(config.model.pattern))
    mixers = {name: fields for name, fields in config.mixers.items() if name in used}
    return RunConfig(model=config.model, mixers=mixers, data=DataConfig(path="", seq_length=config.data.seq_length))


def process_pool(most: int | None = None) -> ProcessPoolExecutor:
    """Processes in which models are built without memory; as many as there are processors, or fewer."""
    size = os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(min(size, most or size), mp_context=context, initializer=_prepare)


def _prepare() -> None:
    """Make the process one without a GPU that compiles nothing, and says nothing of what only matters in training."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    warnings.simplefilter("ignore")
    resolve_name("megatron_ext.platform:before_megatron")()


def _count(*model: Any) -> ModelCounts:
    # By name: torch is imported in that process, and not in the one that reads this module.
    counts: ModelCounts = resolve_name("megatron_ext.planning.weightless:count")(*model)
    return counts
