"""Decoding: a model that remembers what it has seen, given sequences piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ext.mixers.memory import LooksBack, Memory


@contextmanager
def remembering(module: torch.nn.Module) -> Iterator[None]:
    """Within it, each forward pass continues the sequences of the one before; without gradients.

    What was seen is forgotten at the end.

    Args:
        module: all parts of it that look back remember: a model or a mixer.

    Raises:
        ValueError: its layout cuts the sequence or the layers in parts.
    """
    parts = [part for part in module.modules() if isinstance(part, LooksBack)]
    for part in parts:
        _check_layout(part.config)
    training = module.training
    module.eval()
    try:
        for part in parts:
            part.memory = Memory()
        with torch.no_grad():
            yield
    finally:
        module.train(training)
        for part in parts:
            part.memory = None


def _check_layout(config: TransformerConfig) -> None:
    cut = {
        "parallel.context": config.context_parallel_size > 1,
        "parallel.pipeline": config.pipeline_model_parallel_size > 1,
        "parallel.sequence": config.sequence_parallel,
    }
    for field, is_cut in cut.items():
        if is_cut:
            raise ValueError(f"decoding needs the whole sequence and all layers: build the model without {field}")


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
    """Begin new sequences with a language model, as built by `model.build_model`; see `remembering`."""
    with remembering(model):
        yield Decoder(model)
