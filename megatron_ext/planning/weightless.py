"""A model without memory for its weights, and what is counted of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.overrides import TorchFunctionMode

from megatron_ext.config.schema import RunConfig
from megatron_ext.model import build_model, training_flops_per_token
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.parallel.parameters import count_parameters
from megatron_ext.planning.counts import ModelCounts
from megatron_ext.platform import Platform, select_platform
from megatron_ext.training.build import model_shape


class _OnMeta(TorchFunctionMode):
    """Every new tensor is on the meta device, on whatever it is asked for."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("device") is not None:
            given["device"] = "meta"
        return function(*args, **given)


@contextmanager
def on_meta() -> Iterator[None]:
    """Within it models are built without memory. A backward pass knows nothing of it: see `ledger.Watched`."""
    with torch.device("meta"), _OnMeta():
        yield


def count(config: RunConfig, vocab_size: int) -> ModelCounts:
    """Count the whole model, in this process, which is on no GPU.

    Args:
        config: whole, its layout that of one process.
        vocab_size: tokens of the tokenizer, before padding.
    """
    platform, groups = _alone()
    shape = model_shape(config, platform, vocab_size)
    with on_meta():
        chunks = build_model(shape, platform, groups, seed=None)
    flops = training_flops_per_token(shape, chunks, config.data.seq_length)
    return ModelCounts(count_parameters(chunks, tp_size=1).parameters, flops)


@cache
def _alone() -> tuple[Platform, ProcessGroupCollection]:
    """Platform and groups of this process, for as long as it lives."""
    platform = select_platform("cpu")
    return platform, groups_of_one_process(platform.communication).__enter__()
