from __future__ import annotations

from copy import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import RowParallelLinear

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_ext.mixers.attention import SoftmaxAttention
from megatron_ext.mixers.core.settings import AttentionConfig, GatedDeltaNetConfig, Top1ChunkConfig
from megatron_ext.mixers.deltanet import GatedDeltaNet
from megatron_ext.mixers.top1_chunk import Top1Chunk
from megatron_ext.model import build as model_module
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.model.specs import LayerNorm, LocalBackend, RMSNorm, layer_spec, layer_specs, provider
from megatron_ext.parallel.aligned_linear import AlignedColumnParallelLinear
from megatron_ext.platform.device import Platform
from megatron_ext.platform.megatron_versions import mlp_submodules

CPU = Platform(torch.device("cpu"), "gloo")
CONFIGS = {
    "attention": AttentionConfig(window=3),
    "gated_deltanet": GatedDeltaNetConfig(),
    "top1_chunk": Top1ChunkConfig(chunk_size=8),
}


def test_layer_modules_and_configs() -> None:
    names = ["top1_chunk", "attention", "gated_deltanet", "attention"]
    mixers = [spec.submodules.self_attention for spec in layer_specs(names, CONFIGS, "local")]
    assert [mixer.module for mixer in mixers] == [Top1Chunk, SoftmaxAttention, GatedDeltaNet, SoftmaxAttention]
    assert [mixer.params["mixer_config"] for mixer in mixers] == [CONFIGS[name] for name in names]


def test_local_backend_modules() -> None:
    layer = layer_spec("attention", CONFIGS["attention"], "local").submodules
    assert layer.input_layernorm is layer.pre_mlp_layernorm is RMSNorm
    mixer, mlp = layer.self_attention.submodules, mlp_submodules(layer.mlp)
    assert (mixer.in_proj, mixer.out_proj) == (AlignedColumnParallelLinear, RowParallelLinear)
    assert (mlp.linear_fc1, mlp.linear_fc2) == (AlignedColumnParallelLinear, RowParallelLinear)
    assert isinstance(provider("local"), LocalBackend)


@pytest.mark.parametrize(("kind", "names"), [(RMSNorm, ["weight"]), (LayerNorm, ["weight", "bias"])])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_norm_gradient_reduction_flag(sequence_parallel: bool, kind: type, names: list[str]) -> None:
    config = SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=sequence_parallel)
    norm = kind(config, 8, eps=1e-3)
    assert norm.eps == 1e-3
    assert [name for name, _ in norm.named_parameters()] == names
    for parameter in norm.parameters():
        assert parameter.sequence_parallel is sequence_parallel
        assert (parameter.dtype, parameter.shape) == (torch.bfloat16, (8,))


def test_layer_norm_replaces_all_norms() -> None:
    layer = layer_spec("attention", CONFIGS["attention"], "local", normalization="layer_norm").submodules
    assert layer.input_layernorm is layer.pre_mlp_layernorm is LayerNorm


PATTERN = "(top1_chunk,gated_deltanet*2,attention)*2"
C, G, A = "Top1Chunk", "GatedDeltaNet", "SoftmaxAttention"
ALL = [C, G, G, A, C, G, G, A]


@pytest.mark.parametrize(
    ("pipeline", "virtual", "stages"),
    [
        (1, 1, {0: [ALL]}),
        (2, 1, {0: [ALL[:4]], 1: [ALL[4:]]}),
        (4, 1, {0: [[C, G]], 1: [[G, A]], 2: [[C, G]], 3: [[G, A]]}),
        # Interleaved: the first chunks of all stages hold the first half of the model, the second chunks the rest.
        (2, 2, {0: [[C, G], [C, G]], 1: [[G, A], [G, A]]}),
        (2, 4, {0: [[C], [G], [C], [G]], 1: [[G], [A], [G], [A]]}),
    ],
)
def test_pattern_is_divided_into_stages_and_chunks(
    one_process: Any,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: int,
    virtual: int,
    stages: dict[int, list[list[str]]],
) -> None:
    for rank, expected in stages.items():
        chunks = _chunks_of_stage(one_process, monkeypatch, pipeline, virtual, rank)
        found = [[type(layer.self_attention).__name__ for layer in chunk.decoder.layers] for chunk in chunks]
        assert found == expected
        numbers = [layer.layer_number for chunk in chunks for layer in chunk.decoder.layers]
        assert [ALL[number - 1] for number in numbers] == [name for chunk in expected for name in chunk]
        first, last = rank == 0, rank == pipeline - 1
        assert [chunk.pre_process for chunk in chunks] == [first and stage == 0 for stage in range(virtual)]
        assert [chunk.post_process for chunk in chunks] == [last and stage == virtual - 1 for stage in range(virtual)]


def _chunks_of_stage(groups: Any, monkeypatch: pytest.MonkeyPatch, pipeline: int, virtual: int, rank: int) -> list[Any]:
    """Build the chunks of a pipeline rank in this single process."""
    model = ModelConfig(pattern=PATTERN, hidden_size=16, num_attention_heads=2)
    parallel = ParallelConfig(pipeline=pipeline, virtual_pipeline=virtual)
    data, training = DataConfig(path="none", seq_length=8), TrainingConfig(precision="fp32")
    config = derive(RunConfig(data=data, model=model, parallel=parallel, training=training))
    pretended = copy(groups)
    pretended.pp = SimpleNamespace(rank=lambda: rank, size=lambda: pipeline)
    # Weights do not matter here.
    monkeypatch.setattr(model_module, "initialize_model", lambda *_: None)
    return build_model(model_shape(config, CPU, 100), CPU, pretended, seed=1)
