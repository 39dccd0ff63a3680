"""Incremental decoding with a decode cache in each layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.mixers.core.decode_cache import DecodeCache, HistoryModule

_SEQUENCE_PARALLEL = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Attributes of Megatron's configuration, linear layers and embeddings that enable sequence parallelism."""


@contextmanager
def with_decode_caches(module: torch.nn.Module) -> Iterator[list[DecodeCache]]:
    """Context manager in which each forward pass continues the sequences of the previous one, without gradients.

    The decode caches are dropped at the end. Sequence and context parallelism are off, because a single token cannot
    be divided: each rank processes whole sequences. Tensor-parallel ranks must pass the same sequences.

    Args:
        module: a model, the part of it on one pipeline stage, or a mixer. All its `HistoryModule` submodules get a
            decode cache.

    Yields:
        The decode cache of each of these submodules.
    """
    cached = [part for part in module.modules() if isinstance(part, HistoryModule)]
    training = module.training
    module.eval()
    try:
        caches = [DecodeCache() for _ in cached]
        for part, cache in zip(cached, caches, strict=True):
            part.decode_cache = cache
        with torch.no_grad(), _whole_sequences(module):
            yield caches
    finally:
        module.train(training)
        for part in cached:
            part.decode_cache = None


@contextmanager
def _whole_sequences(module: torch.nn.Module) -> Iterator[None]:
    """Context manager in which sequence parallelism is off: no scatter to, or gather from, other ranks."""
    owners: dict[int, Any] = {}
    for part in module.modules():
        owners |= {id(owner): owner for owner in (part, getattr(part, "config", None))}
    changed = [(owner, name) for owner in owners.values() for name in _SEQUENCE_PARALLEL if getattr(owner, name, False)]
    for owner, name in changed:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in changed:
            setattr(owner, name, True)


class Decoder:
    """Language model with the decode state of a batch of sequences; created by `decoding`.

    Args:
        model: maps tokens [b, t] and their positions [b, t] to logits [b, t, vocabulary].
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._num_positions = 0

    def __call__(self, tokens_bt: Tensor) -> Tensor:
        """Extend the sequences by one or more tokens.

        Args:
            tokens_bt: int64 [b, t], on the model's device.

        Returns:
            Next-token logits at each position, [b, t, vocabulary].
        """
        b, t = tokens_bt.shape
        positions_t = torch.arange(self._num_positions, self._num_positions + t, device=tokens_bt.device)
        self._num_positions += t
        logits_btv: Tensor = self._model(tokens_bt, positions_t.expand(b, -1), attention_mask=None)
        return logits_btv


@contextmanager
def decoding(model: torch.nn.Module) -> Iterator[Decoder]:
    """Context manager that begins new sequences with a language model, as in `with_decode_caches`.

    Args:
        model: the only chunk of `build_model` without pipeline parallelism.

    Yields:
        A decoder of new sequences.

    Raises:
        ValueError: the model is divided over pipeline stages.
    """
    if get_model_config(model).pipeline_model_parallel_size > 1:
        raise ValueError("decoding needs all layers: build the model without parallel.pipeline")
    with with_decode_caches(model):
        yield Decoder(model)
