"""Every mixer that flash-linear-attention has as a layer, from input to output, against that layer.

RWKV's are in test_mixer_rwkv.py. fla's Triton kernels are replaced by plain torch; see beside_fla.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from beside_fla import MODULES, assert_same_function, causal_conv1d, fla, l2norm, op, replace
from plain_flash_attention import flash_attn_func, varlen_backward, varlen_forward
from torch import Tensor

pytest.importorskip("fla", reason="flash-linear-attention is not installed")

MakeMixer = Callable[..., Any]
Weights = dict[str, Tensor]
HIDDEN, HEADS, HEAD_DIM = 24, 4, 6


def _delta_rule(*, q: Tensor, k: Tensor, use_qk_l2norm_in_kernel: bool, **given: Any) -> tuple[Tensor, None]:
    assert use_qk_l2norm_in_kernel
    plain = op("ops.delta_rule.naive.delta_rule_recurrence", "q k v beta", heads_first=True)
    return plain(q=l2norm(q), k=l2norm(k), **given)


def _gated_delta_rule(
    *, q: Tensor, k: Tensor, beta: Tensor, g: Tensor, A_log: Tensor, dt_bias: Tensor, **given: Any
) -> tuple[Tensor, None]:
    for done_here in ("qk_l2norm", "beta_sigmoid", "gate"):
        assert given.pop(f"use_{done_here}_in_kernel")
    g = fla("ops.gated_delta_rule.gate.naive_gdn_gate")(g, A_log, dt_bias)
    plain = op("ops.gated_delta_rule.naive.naive_recurrent_gated_delta_rule", "q k v beta g")
    return plain(q=l2norm(q), k=l2norm(k), beta=beta.sigmoid(), g=g, **given)


def _based(*, scale: float, use_norm: bool, **given: Any) -> Tensor:
    assert use_norm
    assert scale == given["q"].shape[-1] ** -0.5  # the plain op's own
    return op("ops.based.naive.naive_parallel_based", "q k v", heads_first=True)(**given)[0]


def _mean_pooling(x: Tensor, block_size: int, cu_seqlens: None) -> Tensor:
    return torch.stack([block.mean(1) for block in x.split(block_size, 1)], 1)


OPS: dict[str, Any] = {
    "layers.gla.fused_recurrent_gla": op("ops.gla.naive.naive_recurrent_gla", "q k v gk"),
    "layers.multiscale_retention.chunk_retention": op("ops.retention.naive.naive_retention", "q k v", heads_first=True),
    "layers.linear_attn.chunk_linear_attn": op("ops.linear_attn.naive.naive_recurrent_linear_attn", "q k v"),
    "layers.linear_attn.elu_p1": lambda x: F.elu(x) + 1,
    "layers.delta_net.fused_recurrent_delta_rule": _delta_rule,
    "layers.gated_deltanet.chunk_gated_delta_rule": _gated_delta_rule,
    "layers.gated_deltanet.causal_conv1d": causal_conv1d,
    "layers.based.parallel_based": _based,
    "layers.attn.flash_attn_func": flash_attn_func,
    "layers.nsa.parallel_nsa": lambda **given: fla("ops.nsa.naive.naive_nsa")(**given),
    "ops.nsa.naive.mean_pooling": _mean_pooling,
    "ops.nsa.naive.flash_attn_func": flash_attn_func,
    # Its own choice of blocks and its own merging of them; only attention itself is plain.
    "ops.moba.parallel.flash_attn_varlen_func": varlen_forward,
    "ops.moba.parallel._flash_attn_varlen_forward": varlen_forward,
    "ops.moba.parallel._flash_attn_varlen_backward": varlen_backward,
    # These two layers have plain forms of their own, which lack a plain SiLU.
    "layers.mamba.ACT2FN": {"silu": F.silu},
    "layers.mamba2.ACT2FN": {"silu": F.silu},
}


def _rows(mixer: Any, **widths: int) -> Weights:
    """Rows of the input projection by what they yield, all units' together as fla has them."""
    parts = mixer.in_proj.weight.unflatten(0, (mixer.num_units(), -1)).split(list(widths.values()), 1)
    return {name: part.flatten(0, 1) for name, part in zip(widths, parts, strict=True)}


def _projections(mixer: Any, **widths: int) -> Weights:
    rows = _rows(mixer, **widths)
    named = {f"{name}_proj.weight": rows[name] for name, width in widths.items() if width}
    return {**named, "o_proj.weight": mixer.out_proj.weight}


def _stateful(mixer: Any, norm: str, **more: int) -> Weights:
    widths = {"q": mixer.head_dim, "k": mixer.head_dim, "v": mixer.value_dim, "g": mixer.gate_width}
    return {**_projections(mixer, **widths, **more), f"{norm}.weight": mixer.norm_weight}


def _retnet(mixer: Any) -> Weights:
    return _stateful(mixer, "g_norm_swish_gate" if mixer.mixer_config.output_gate else "g_norm")


def _gla(mixer: Any) -> Weights:
    return _retnet(mixer) | {
        "gk_proj.0.weight": mixer.decay_down,
        "gk_proj.1.weight": mixer.decay_up.flatten(0, 1),
        "gk_proj.1.bias": mixer.decay_bias.flatten(),
    }


def _deltanet(mixer: Any, **more: int) -> Weights:
    widths = [mixer.head_dim, mixer.head_dim, mixer.value_dim]
    taps = dict(zip("qkv", mixer.conv_weight.split(widths, 1), strict=True))
    convolutions = {f"{name}_conv1d.weight": weight.flatten(0, 1)[:, None] for name, weight in taps.items()}
    return _stateful(mixer, "o_norm", b=1, **more) | convolutions


def _gated_deltanet(mixer: Any) -> Weights:
    return _deltanet(mixer, a=1) | {"A_log": mixer.log_decay, "dt_bias": mixer.step_bias}


def _based_weights(mixer: Any) -> Weights:
    width = mixer.mixer_config.feature_dim
    return _projections(mixer, q=width, k=width, v=mixer.head_dim)


def _key_value(mixer: Any, **more: int) -> Weights:
    return _projections(mixer, q=mixer.output_width(), k=mixer.head_dim, v=mixer.head_dim, **more)


def _nsa(mixer: Any) -> Weights:
    return _key_value(mixer, g=3 * mixer.queries_per_group)


def _mamba(mixer: Any) -> Weights:
    rows = _rows(mixer, x=mixer.output_width(), z=mixer.output_width())
    return {
        "in_proj.weight": torch.cat([rows["x"], rows["z"]]),
        "conv1d.weight": mixer.conv_weight.flatten(0, 1)[:, None],
        "conv1d.bias": mixer.conv_bias.flatten(),
        "x_proj.weight": mixer.x_proj.transpose(0, 1).flatten(1),
        "dt_proj.weight": mixer.dt_proj.flatten(0, 1),
        "dt_proj.bias": mixer.dt_bias.flatten(),
        "A_log": mixer.A_log.flatten(0, 1),
        "D": mixer.D.flatten(),
        "out_proj.weight": mixer.out_proj.weight,
    }


def _mamba2(mixer: Any) -> Weights:
    size, width = mixer.mixer_config.state_size, mixer.output_width()
    rows = _rows(mixer, x=width, B=size, C=size, z=width, step=mixer.step_width)
    taps, biases = (y.split([width, size, size], 1) for y in (mixer.conv_weight, mixer.conv_bias))
    return {
        "in_proj.weight": torch.cat([rows[name] for name in ("z", "x", "B", "C", "step")]),
        "conv1d.weight": torch.cat([y.flatten(0, 1) for y in taps])[:, None],
        "conv1d.bias": torch.cat([y.flatten() for y in biases]),
        "dt_bias": mixer.step_bias.flatten(),
        "A_log": mixer.log_decay.flatten(),
        "D": mixer.skip.flatten(),
        "norm.weight": mixer.group_norm_weight.flatten(),
        "out_proj.weight": mixer.out_proj.weight,
    }


@dataclass(frozen=True)
class Case:
    """A mixer's settings, fla's layer with its settings, and the one's weights by the names of the other."""

    mixer: str
    layer: str
    weights: Callable[[Any], Weights]
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.mixer, *(f"{name}={value}" for name, value in self.ours.items())])


NARROW = {"expand_v": 1, "output_gate": False}
CASES = [
    Case("retnet", "multiscale_retention.MultiScaleRetention", _retnet),
    Case(
        "retnet",
        "multiscale_retention.MultiScaleRetention",
        _retnet,
        NARROW,
        {"expand_v": 1.0, "use_output_gate": False},
    ),
    Case("gla", "gla.GatedLinearAttention", _gla, {}, {"expand_k": 1.0, "expand_v": 2.0}),
    Case(
        "gla",
        "gla.GatedLinearAttention",
        _gla,
        NARROW | {"decay_rank": 3, "decay_temperature": 2},
        {"expand_k": 1.0, "use_output_gate": False, "gate_low_rank_dim": 3, "gate_logit_normalizer": 2},
    ),
    *(
        Case(
            "linear_attention",
            "linear_attn.LinearAttention",
            lambda mixer: _stateful(mixer, "norm"),
            {"feature_map": name, "expand_v": expand_v},
            {"feature_map": name, "expand_v": expand_v},
        )
        for name, expand_v in (("elu", 1), ("relu", 2), ("identity", 1))
    ),
    Case("deltanet", "delta_net.DeltaNet", _deltanet),
    Case(
        "deltanet",
        "delta_net.DeltaNet",
        _deltanet,
        {"expand_v": 2, "output_gate": True, "conv_kernel_size": 3},
        {"expand_v": 2, "use_gate": True, "conv_size": 3},
    ),
    Case(
        "gated_deltanet",
        "gated_deltanet.GatedDeltaNet",
        _gated_deltanet,
        {},
        {"head_dim": HEAD_DIM, "expand_v": 1},
    ),
    Case(
        "gated_deltanet",
        "gated_deltanet.GatedDeltaNet",
        _gated_deltanet,
        {"expand_v": 2, "output_gate": False, "conv_kernel_size": 3},
        {"head_dim": HEAD_DIM, "expand_v": 2, "use_gate": False, "conv_size": 3},
    ),
    # fla adds 1e-6 to the sum of weights, which is at least half the number of keys.
    # Channels are twice as wide as the hidden state, as are ours by default.
    Case("mamba", "mamba.Mamba", _mamba, {}, {"intermediate_size": 2 * HIDDEN}),
    Case(
        "mamba2",
        "mamba2.Mamba2",
        _mamba2,
        {"groups": 1, "state_size": 5},
        {"head_dim": 2 * HEAD_DIM, "state_size": 5, "n_groups": 1, "chunk_size": 4},
    ),
    Case("attention", "attn.Attention", _key_value),
    Case(
        "attention",
        "attn.Attention",
        _key_value,
        {"groups": 2, "window": 5},
        {"num_kv_heads": 2, "window_size": 5},
    ),
    Case("moba", "moba.MoBA", _key_value, {"block_size": 2, "top_k": 3}, {"moba_chunk_size": 2, "moba_topk": 3}),
    # fla takes groups of 16 heads or more.
    Case(
        "nsa",
        "nsa.NativeSparseAttention",
        _nsa,
        {"heads": 16, "groups": 1, "block_size": 2, "num_selected": 4, "window": 3},
        {
            "num_heads": 16,
            "num_kv_heads": 1,
            "head_dim": HEAD_DIM,
            "block_size": 2,
            "block_counts": 4,
            "window_size": 3,
        },
    ),
    Case("based", "based.BasedLinearAttention", _based_weights, {}, {"num_key_value_heads": HEADS}),
]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, MODULES | OPS)


def _layer(case: Case) -> torch.nn.Module:
    sizes = {"hidden_size": HIDDEN} | ({} if case.mixer == "mamba" else {"num_heads": HEADS})
    layer = fla(f"layers.{case.layer}")(**sizes | case.theirs)
    if case.mixer == "moba":
        layer.o_norm = torch.nn.Identity()  # of each head's output: fla's addition, the paper has none
    return layer


# Where inputs are small, so are what norms divide by: an epsilon that is not fla's shows.
@pytest.mark.parametrize("size", [1.0, 0.01])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_those_of_flash_linear_attention(
    make_mixer: MakeMixer, hidden_states: Tensor, case: Case, size: float
) -> None:
    mixer = make_mixer(case.mixer, **case.ours)
    assert_same_function(mixer, _layer(case), case.weights(mixer), size * hidden_states)
