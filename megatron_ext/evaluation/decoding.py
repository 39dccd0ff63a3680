"""Decoding: a model that remembers what it has seen, given sequences piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.mixers.memory import LooksBack, Memory

_SEQUENCE_PARALLEL = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")
"""Where Megatron's configuration, linear layers and embeddings keep that sequences are cut."""


@contextmanager
def remembering(module: torch.nn.Module) -> Iterator[list[Memory]]:
    """Within it, each forward pass continues the sequences of the one before; without gradients.

    What was seen is forgotten at the end. Sequence and context parallelism rest, as a single token has no parts: each
    rank is given, and gives, whole sequences, tensor-parallel ranks the same ones.

    Args:
        module: all parts of it that look back remember: a model, a pipeline stage's part of it, or a mixer.

    Yields:
        What each part of it remembers.
    """
    parts = [part for part in module.modules() if isinstance(part, LooksBack)]
    training = module.training
    module.eval()
    try:
        memories = [Memory() for _ in parts]
        for part, memory in zip(parts, memories, strict=True):
            part.memory = memory
        with torch.no_grad(), _whole_sequences(module):
            yield memories
    finally:
        module.train(training)
        for part in parts:
            part.memory = None


@contextmanager
def _whole_sequences(module: torch.nn.Module) -> Iterator[None]:
    """Within it nothing is scattered over, or gathered from, sequence-parallel ranks."""
    holders: dict[int, Any] = {}
    for part in module.modules():
        holders |= {id(holder): holder for holder in (part, getattr(part, "config", None))}
    changed = [
        (holder, name) for holder in holders.values() for name in _SEQUENCE_PARALLEL if getattr(holder, name, False)
    ]
    for holder, name in changed:
        setattr(holder, name, False)
    try:
        yield
    finally:
        for holder, name in changed:
            setattr(holder, name, True)


class Decoder:
    """A language model in the middle of a batch of sequences; made by `decoding`.

    Args:
        model: maps tokens [b, t] and their positions [b, t] to logits [b, t, vocabulary].
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._num_positions = 0

    def __call__(self, tokens_bt: Tensor) -> Tensor:
        """Continue the sequences by one token or several.

        Args:
            tokens_bt: int64 [b, t], on the model's device.

        Returns:
            Logits of what follows each of them, [b, t, vocabulary].
        """
        b, t = tokens_bt.shape
        positions_t = torch.arange(self._num_positions, self._num_positions + t, device=tokens_bt.device)
        self._num_positions += t
        logits_btv: Tensor = self._model(tokens_bt, positions_t.expand(b, -1), attention_mask=None)
        return logits_btv


@contextmanager
def decoding(model: torch.nn.Module) -> Iterator[Decoder]:
    """Begin new sequences with a language model, as built by `model.build_model`; see `remembering`.

    Raises:
        ValueError: not all layers are in one process.
    """
    if get_model_config(model).pipeline_model_parallel_size > 1:
        raise ValueError("decoding needs all layers: build the model without parallel.pipeline")
    with remembering(model):
        yield Decoder(model)
