"""Token-by-token decoding of a whole model, compared with the logits of one full pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.evaluation.decoding import decoding
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.platform.device import Platform

LENGTH, VOCABULARY = 24, 100
HYBRID = "attention,gated_deltanet,top1_chunk,mamba2,nsa,mamba,rwkv7,retnet,attention"
MIXERS = {
    "attention": {"position_encoding": "learned", "window": 7},
    "top1_chunk": {"chunk_size": 4},
    "nsa": {"block_size": 4, "num_selected": 4, "window": 5},
    "mamba2": {"state_size": 8},
}


CASES = [("fp32", "transformer"), ("bf16", "transformer"), ("fp32", "rwkv7"), ("fp32", "mixer")]


@pytest.fixture(params=CASES, ids="-".join)
def model(request: pytest.FixtureRequest, one_process: Any) -> torch.nn.Module:
    """Hybrid model with a learned position table. Large initial weights make every layer matter."""
    precision, block = request.param
    sizes = ModelConfig(
        pattern=HYBRID, hidden_size=32, num_attention_heads=4, num_query_groups=2, init_std=0.2, block=block
    )
    data, training = DataConfig(path="none", seq_length=LENGTH), TrainingConfig(precision=precision)
    config = derive(RunConfig(data=data, model=sizes, mixers=MIXERS, training=training))
    cpu = Platform(torch.device("cpu"), "gloo")
    shape = model_shape(config, cpu, VOCABULARY)
    assert shape.learns_positions
    (built,) = build_model(shape, cpu, one_process, seed=3)
    return built


@torch.no_grad()
def _at_once(model: torch.nn.Module, tokens_bt: Tensor) -> Tensor:
    positions_bt = torch.arange(tokens_bt.shape[1]).expand_as(tokens_bt)
    return model(tokens_bt, positions_bt, attention_mask=None)


@pytest.mark.parametrize("lengths", [[9, *[1] * 15], [1, 8, 3, 1, 11]], ids=["prompt", "pieces"])
def test_logits_token_by_token_are_those_of_all_at_once(model: torch.nn.Module, lengths: list[int]) -> None:
    tokens_bt = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    whole = _at_once(model, tokens_bt)
    with decoding(model) as decoder:
        found = torch.cat([decoder(piece) for piece in tokens_bt.split(lengths, dim=1)], 1)
    error = float((found - whole).norm() / whole.norm())
    assert error < {torch.float32: 5e-6, torch.bfloat16: 2e-2}[next(model.parameters()).dtype]


def test_sequences_begin_anew(model: torch.nn.Module) -> None:
    tokens_bt = torch.randint(0, VOCABULARY, (1, 6), generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        with decoding(model) as decoder:
            first = decoder(tokens_bt[:, :1])
        torch.testing.assert_close(first, _at_once(model, tokens_bt[:, :1]), rtol=0, atol=0)
    assert model.training


def test_a_part_of_the_layers_is_refused(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_model_config(model), "pipeline_model_parallel_size", 2)
    with pytest.raises(ValueError, match=r"parallel\.pipeline"), decoding(model):
        pass
    assert model.training


def test_sequence_parallelism_rests_and_goes_on(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_model_config(model)
    monkeypatch.setattr(config, "sequence_parallel", True)
    with decoding(model):
        assert not config.sequence_parallel
    assert config.sequence_parallel
