"""Decoding: a model that remembers what it has seen, given a sequence piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ext.mixers.base import Mixer
from megatron_ext.mixers.memory import Memory


@contextmanager
def decoding(model: torch.nn.Module) -> Iterator[None]:
    """Within it, each forward pass continues the sequences of the one before; without gradients.

    Any number of positions may be given at a time: the prompt, then token by token. Learned position tables are given
    their positions by the caller, as ever. What was seen is forgotten at the end.

    Args:
        model: whose mixers remember; whole on its tensor-parallel ranks.

    Raises:
        ValueError: the layout of the model cuts the sequence or the layers in parts.
    """
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    for mixer in mixers:
        _check_layout(mixer)
        mixer.memory = Memory()
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
        for mixer in mixers:
            mixer.memory = None


def _check_layout(mixer: Mixer) -> None:
    config = mixer.config
    cut = {
        "parallel.context": config.context_parallel_size > 1,
        "parallel.pipeline": config.pipeline_model_parallel_size > 1,
        "parallel.sequence": config.sequence_parallel,
    }
    for field, is_cut in cut.items():
        if is_cut:
            raise ValueError(f"decoding needs the whole sequence and all layers: build the model without {field}")
