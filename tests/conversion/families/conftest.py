from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture
def build(one_process: Any) -> Callable[..., torch.nn.Module]:
    """Function that builds a Selectron model from its shape, with every parameter drawn from a seed."""
    from megatron_ext.model.build import build_model
    from megatron_ext.platform.device import Platform

    def make(shape: Any) -> torch.nn.Module:
        (model,) = build_model(shape, Platform(torch.device("cpu"), "gloo"), one_process, seed=3)
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.4, generator=generator)
        return model

    return make


@pytest.fixture
def tensors() -> Callable[[Any, torch.nn.Module], dict[str, Tensor]]:
    """Function that returns the tensors of a Selectron checkpoint without the vocabulary padding."""
    from megatron_ext.parallel.parameters import global_parameters

    def of(shape: Any, model: torch.nn.Module) -> dict[str, Tensor]:
        found = {name: parameter.detach() for name, parameter in global_parameters(model)}  # type: ignore[arg-type]
        padded = ("embedding.word_embeddings.weight", "output_layer.weight")
        return {name: x[: shape.vocab_size] if name in padded else x for name, x in found.items()}

    return of
