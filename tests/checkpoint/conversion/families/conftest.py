from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

# What replaces flash-linear-attention's kernels is a module of the mixers' tests.
sys.path.append(str(Path(__file__).parents[3] / "mixers"))


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], torch.nn.Module]:
    """Build a config.json's model in its own library, on the CPU."""
    import transformers

    def build(config: dict[str, Any]) -> torch.nn.Module:
        (architecture,) = config["architectures"]
        if hasattr(transformers, architecture):
            cls = getattr(transformers, architecture)
        else:
            pytest.importorskip("fla", reason="flash-linear-attention is not installed")
            from beside_fla import IN_MODELS, PLAIN, fla, replace

            replace(monkeypatch, PLAIN | IN_MODELS)
            cls = fla(f"models.{architecture}")
        return cls(cls.config_class.from_dict(dict(config))).eval()

    return build


@pytest.fixture
def build(one_process: Any) -> Callable[..., torch.nn.Module]:
    """Build a model of ours from its shape, every parameter drawn from a seed."""
    from megatron_ext.model import build_model
    from megatron_ext.platform import Platform

    def make(shape: Any) -> torch.nn.Module:
        (model,) = build_model(shape, Platform(torch.device("cpu"), "gloo"), one_process, seed=3)
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.4, generator=generator)
        return model

    return make


@pytest.fixture
def tensors() -> Callable[[Any, torch.nn.Module], dict[str, Tensor]]:
    """What a checkpoint of one of our models holds, without the padding of the vocabulary."""
    from megatron_ext.parallel.parameters import global_parameters

    def of(shape: Any, model: torch.nn.Module) -> dict[str, Tensor]:
        found = {name: parameter.detach() for name, parameter in global_parameters(model)}  # type: ignore[arg-type]
        padded = ("embedding.word_embeddings.weight", "output_layer.weight")
        return {name: x[: shape.vocab_size] if name in padded else x for name, x in found.items()}

    return of
