from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.model.build import build_model, packed_flops_per_token, training_flops_per_token, transformer_config
from megatron_ext.model.pipeline_schedule import evaluation_mode
from megatron_ext.model.shape import ModelShape, model_shape
from megatron_ext.platform.device import Platform
from megatron_ext.utils.errors import UserError

CPU = Platform(torch.device("cpu"), "gloo")
HIDDEN, HEADS, FFN, LENGTH = 32, 4, 48, 16


def _shape(pattern: str, vocab_size: int = 100, **mixers: Any) -> ModelShape:
    model = ModelConfig(pattern=pattern, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN)
    config = derive(RunConfig(data=DataConfig(path="none", seq_length=LENGTH), model=model, mixers=mixers))
    return model_shape(config, CPU, vocab_size)


@pytest.mark.parametrize(("tokens", "rows"), [(1, 128), (127, 128), (128, 128), (129, 256), (50257, 50304)])
@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(tensor=2, pipeline=2)])
def test_padded_vocabulary(tokens: int, rows: int, parallel: ParallelConfig) -> None:
    assert replace(_shape("attention", tokens), parallel=parallel).padded_vocab_size == rows


def test_settings_reach_megatron_config() -> None:
    shape = _shape("attention*4")
    plain = transformer_config(shape, CPU)
    assert (plain.params_dtype, plain.bf16, plain.recompute_granularity) == (torch.bfloat16, True, None)
    other = replace(shape, precision="fp32", recompute="full", parallel=ParallelConfig(pipeline=2, virtual_pipeline=2))
    config = transformer_config(other, CPU)
    assert (config.params_dtype, config.bf16, config.recompute_granularity) == (torch.float32, False, "full")
    assert config.virtual_pipeline_model_parallel_size == 2
    # Megatron's batched exchange between interleaved chunks of two stages silently gives wrong gradients.
    assert not config.batch_p2p_comm
    assert config.overlap_p2p_comm


@pytest.mark.parametrize(("fp8", "expected"), [("none", None), ("tensorwise", "hybrid"), ("blockwise", "e4m3")])
def test_fp8_recipes(fp8: str, expected: str | None) -> None:
    config = transformer_config(replace(_shape("attention"), fp8=fp8), CPU)
    assert config.fp8 == expected
    assert expected is None or config.fp8_recipe == fp8


@pytest.mark.parametrize(("parallel", "split"), [({}, False), ({"tensor": 2}, True)])
def test_sequence_parallelism_follows_tensor_parallelism(parallel: dict[str, int], split: bool) -> None:
    run = derive(RunConfig(data=DataConfig(path="none"), parallel=ParallelConfig(**parallel)))
    assert transformer_config(model_shape(run, CPU, 100), CPU).sequence_parallel is split


def test_fp8_requires_transformer_engine() -> None:
    run = RunConfig(data=DataConfig(path="none"), training=TrainingConfig(fp8="tensorwise"))
    with pytest.raises(UserError, match=r"training.fp8: 'tensorwise' is computed by Transformer Engine, which needs a"):
        model_shape(derive(run), CPU, 100)


def test_copy_engines_require_gpu() -> None:
    parallel = ParallelConfig(context=2, context_transport="copy_engine")
    run = RunConfig(data=DataConfig(path="none"), parallel=parallel)
    with pytest.raises(UserError, match=r"parallel.context_transport: copy_engine, and there is no GPU; train on GPUs"):
        model_shape(derive(run), CPU, 100)


def test_evaluation_disables_fp8(one_process: Any) -> None:
    (model,) = build_model(replace(_shape("attention*2"), precision="fp32"), CPU, one_process, seed=1)
    config = model.decoder.config
    config.fp8 = "hybrid"
    with evaluation_mode([model]):
        assert config.fp8 is None
    assert config.fp8 == "hybrid"
    assert all(layer.config is config for layer in model.decoder.layers)


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("mlp", 2)])
@pytest.mark.parametrize("block", ["transformer", "rwkv7"])
def test_only_feed_forward_is_recomputed(block: Any, recompute: str, times: int, one_process: Any) -> None:
    shape = _shape("attention*2")
    shape = replace(shape, model=replace(shape.model, block=block), recompute=recompute, precision="fp32")
    (model,) = build_model(shape, CPU, one_process, seed=1)
    calls: Counter[str] = Counter()
    for layer in model.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.update(["mlp"]))
        layer.self_attention.register_forward_pre_hook(lambda *_: calls.update(["mixer"]))
    tokens = torch.arange(16)[None]
    model(tokens, tokens, attention_mask=None, labels=tokens).sum().backward()
    assert calls == {"mlp": 2 * times, "mixer": 2}
    with torch.no_grad():
        model(tokens, tokens, attention_mask=None, labels=tokens)
    assert calls["mlp"] == 2 * times + 2


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_losses_equal_cross_entropy_of_logits(tie_embeddings: bool, one_process: Any) -> None:
    shape = _shape("attention*2")
    shape = replace(shape, model=replace(shape.model, tie_embeddings=tie_embeddings), precision="fp32")
    (model,) = build_model(shape, CPU, one_process, seed=1)
    tokens, labels = torch.randint(100, (2, 2, LENGTH))
    positions = torch.arange(LENGTH).expand(2, -1)
    logits_btv = model(tokens, positions, attention_mask=None)
    mask = (torch.arange(LENGTH) % 3 > 0).float().expand(2, -1)
    losses_bt = model(tokens, positions, attention_mask=None, labels=labels, loss_mask=mask)
    expected_bt = torch.nn.functional.cross_entropy(logits_btv[..., :100].mT, labels, reduction="none")
    torch.testing.assert_close(losses_bt, expected_bt)
    weight = model.shared_embedding_or_output_weight() if tie_embeddings else model.output_layer.weight
    found, expected = (torch.autograd.grad((x * mask).sum(), weight)[0] for x in (losses_bt, expected_bt))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("tie_embeddings", [False, True])
def test_vocabulary_padding_does_not_affect_losses(tie_embeddings: bool, one_process: Any) -> None:
    """Compare a vocabulary of 100 tokens padded to 100, 128 and 640 rows."""
    tokens, labels = torch.randint(100, (2, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    found = []
    for multiple in (1, 128, 640):
        shape = replace(_shape("attention"), precision="fp32")
        sizes = replace(shape.model, tie_embeddings=tie_embeddings, vocab_size_multiple=multiple, init_std=0.3)
        (model,) = build_model(replace(shape, model=sizes), CPU, one_process, seed=1)
        losses = model(tokens, positions, attention_mask=None, labels=labels)
        losses.sum().backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            if name in gradients:
                assert (gradients[name][100:] == 0).all()
                gradients[name] = gradients[name][:100]
        found.append((losses.detach(), gradients))
    for losses, gradients in found[1:]:
        torch.testing.assert_close(losses, found[0][0])
        torch.testing.assert_close(gradients, found[0][1])


def test_block_has_no_biases_or_dropout(one_process: Any) -> None:
    (model,) = build_model(replace(_shape("attention*2"), precision="fp32"), CPU, one_process, seed=1)
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model.config.attention_dropout == model.config.hidden_dropout == 0.0
    assert sorted({name.rpartition("norm.")[2] for name, _ in model.named_parameters() if "norm." in name}) == [
        "weight"
    ]


def test_learned_position_embeddings(one_process: Any) -> None:
    learned = {"attention": {"position_encoding": "learned"}}
    (model,) = build_model(replace(_shape("attention", **learned), precision="fp32"), CPU, one_process, seed=1)
    tokens, positions = torch.tensor([[3, 5]]), torch.tensor([[7, 2]])
    words, table = model.embedding.word_embeddings.weight, model.embedding.position_embeddings.weight
    assert table.shape == (LENGTH, HIDDEN)
    embedded = model.embedding(tokens, positions)
    torch.testing.assert_close(embedded[:, 0], words[[3, 5]] + table[[7, 2]], rtol=0, atol=0)
    (plain,) = build_model(replace(_shape("attention"), precision="fp32"), CPU, one_process, seed=1)
    assert not hasattr(plain.embedding, "position_embeddings")


def test_unused_mixer_needs_no_position_embeddings() -> None:
    shape = _shape("gated_deltanet", attention={"position_encoding": "learned"})
    assert not shape.learns_positions


@pytest.mark.parametrize(
    ("block", "normalization"), [("transformer", "rms_norm"), ("mixer", "rms_norm"), ("transformer", "layer_norm")]
)
def test_losses_equal_reference_block(one_process: Any, block: str, normalization: str) -> None:
    """Explicit form: norm, mixer, residual, and in the first block norm, SwiGLU, residual; final norm, output layer."""
    plain = replace(_shape("attention,gated_deltanet"), precision="fp32")
    shape = replace(plain, model=replace(plain.model, block=block, normalization=normalization, init_std=0.2))
    (model,) = build_model(shape, CPU, one_process, seed=3)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.bias"):
            assert parameter.unique().tolist() == [0.0]
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(5))
    tokens = torch.randint(0, 100, (2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(2, -1)
    losses = model(tokens[:, :-1], positions, attention_mask=None, labels=tokens[:, 1:])
    with torch.no_grad():
        x = model.embedding.word_embeddings.weight[tokens[:, :-1]].transpose(0, 1)
        for layer in model.decoder.layers:
            x = x + layer.self_attention(_norm(x, layer.input_layernorm))[0]
            if block == "transformer":
                x = x + _swiglu(_norm(x, layer.pre_mlp_layernorm), layer.mlp)
        logits = _norm(x, model.decoder.final_layernorm) @ model.output_layer.weight[:100].T
        expected = torch.nn.functional.cross_entropy(
            logits.transpose(0, 1).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        ).view(2, LENGTH)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


def _norm(x: torch.Tensor, norm: Any) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True) if hasattr(norm, "bias") else x
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    return normed + norm.bias if hasattr(norm, "bias") else normed


def _swiglu(x: torch.Tensor, mlp: Any) -> torch.Tensor:
    gate, up = mlp.linear_fc1.weight[:FFN], mlp.linear_fc1.weight[FFN:]
    hidden = x @ gate.T
    return (hidden * hidden.sigmoid() * (x @ up.T)) @ mlp.linear_fc2.weight.T


def test_flops_per_token_by_hand(one_process: Any) -> None:
    shape = replace(_shape("attention,gated_deltanet"), precision="fp32")
    chunks = build_model(shape, CPU, one_process, seed=1)
    d = HIDDEN // HEADS
    attention_weights = HIDDEN * 3 * HIDDEN + HIDDEN * HIDDEN
    # A pair of query and key costs one multiply-add per width for score and value each; (T + 1) / 2 pairs per query.
    pairs = sum(1 for t in range(LENGTH) for s in range(LENGTH) if s <= t) / LENGTH
    attention = 6 * attention_weights + 3 * HEADS * pairs * (2 * d + 2 * d)
    # Input projection: query, key, value, gate, two numbers per head. Then convolution taps, decay, bias, norm weight.
    delta_weights = HIDDEN * HEADS * (4 * d + 2) + HIDDEN * HIDDEN + HEADS * 3 * d * 4 + 2 * HEADS + d
    # Read the state with the key, write it, read it with the query: one multiply-add per entry each.
    delta = 6 * delta_weights + 3 * HEADS * 3 * 2 * d * d
    feed_forward = 6 * 3 * HIDDEN * FFN
    expected = attention + delta + 2 * feed_forward + 6 * HIDDEN * shape.padded_vocab_size
    assert training_flops_per_token(shape, chunks, LENGTH) == pytest.approx(expected, rel=1e-12)


def test_channel_mix_flops(one_process: Any) -> None:
    plain = replace(_shape("attention*2"), precision="fp32")
    shape = replace(plain, model=replace(plain.model, block="rwkv7"))
    of_plain, of_block = (
        training_flops_per_token(one, build_model(one, CPU, one_process, seed=1), LENGTH) for one in (plain, shape)
    )
    assert of_plain - of_block == pytest.approx(2 * 6 * HIDDEN * FFN, rel=1e-12)


def test_flops_of_packed_documents(one_process: Any) -> None:
    """Attention counts only pairs within documents. Costs per token do not change."""
    shape = replace(_shape("attention"), precision="fp32")
    chunks = build_model(shape, CPU, one_process, seed=1)
    lengths = [16, 5, 5, 6, 1, 15]
    pairs = sum(n * (n + 1) // 2 for n in lengths)
    whole = sum(LENGTH * (LENGTH + 1) // 2 for _ in range(3))
    found = packed_flops_per_token(shape, chunks, Counter(lengths))
    fewer = 3 * 4 * HIDDEN * (whole - pairs) / sum(lengths)
    assert found == pytest.approx(training_flops_per_token(shape, chunks, LENGTH) - fewer, rel=1e-12)
    assert packed_flops_per_token(shape, chunks, {LENGTH: 3}) == training_flops_per_token(shape, chunks, LENGTH)


def test_flops_without_feed_forward(one_process: Any) -> None:
    plain = replace(_shape("attention*2"), precision="fp32")
    shape = replace(plain, model=replace(plain.model, block="mixer", ffn_hidden_size=None))
    of_plain, of_block = (
        training_flops_per_token(one, build_model(one, CPU, one_process, seed=1), LENGTH) for one in (plain, shape)
    )
    assert of_plain - of_block == pytest.approx(2 * 6 * 3 * HIDDEN * FFN, rel=1e-12)


def test_flops_of_pipeline_stage(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(_shape("attention*2"), precision="fp32")
    (whole,) = build_model(shape, CPU, one_process, seed=1)
    (half,) = build_model(replace(shape, mixers=["attention"]), CPU, one_process, seed=1)
    monkeypatch.setattr(half, "post_process", False)
    output = 6 * HIDDEN * shape.padded_vocab_size
    of_whole = training_flops_per_token(shape, [whole], LENGTH)
    assert training_flops_per_token(shape, [half], LENGTH) == pytest.approx((of_whole - output) / 2)


def test_flops_count_replicated_parameters_once(one_process: Any) -> None:
    """`num_parameters` covers the whole layer, including the parameters on other tensor-parallel ranks."""
    (model,) = build_model(replace(_shape("gated_deltanet"), precision="fp32"), CPU, one_process, seed=1)
    mixer = next(module for module in model.modules() if isinstance(module, Mixer))
    whole = mixer.num_parameters()
    mixer.tp_size = 2
    for parameter in mixer.parameters():
        if hasattr(parameter, "partition_dim") and parameter is not mixer.norm_weight:
            parameter.tensor_model_parallel = True
    assert mixer.num_parameters() == 2 * (whole - mixer.norm_weight.numel()) + mixer.norm_weight.numel()
