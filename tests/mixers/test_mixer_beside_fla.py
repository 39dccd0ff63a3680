"""Mixers that flash-linear-attention has as layers, compared with these layers from input to output.

RWKV is in test_mixer_rwkv.py. `beside_fla` replaces fla's Triton kernels by plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from beside_fla import PLAIN, assert_same_function, converted, fla, replace
from torch import Tensor

from megatron_ext.bench.layers import peers

# Not `importorskip`: importing fla imports torch's compiler, in each test worker.
pytestmark = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")

MakeMixer = Callable[..., Any]
Weights = dict[str, Tensor]
HIDDEN, HEADS, HEAD_DIM = 24, 4, 6


def _rows(mixer: Any, **widths: int) -> Weights:
    """Rows of the input projection by feature, merged over head groups as in fla."""
    parts = mixer.in_proj.weight.unflatten(0, (mixer.num_head_groups(), -1)).split(list(widths.values()), 1)
    return {name: part.flatten(0, 1) for name, part in zip(widths, parts, strict=True)}


def _projections(mixer: Any, **widths: int) -> Weights:
    rows = _rows(mixer, **widths)
    named = {f"{name}_proj.weight": rows[name] for name, width in widths.items() if width}
    return {**named, "o_proj.weight": mixer.out_proj.weight}


def _stateful(mixer: Any, norm: str) -> Weights:
    widths = {"q": mixer.head_dim, "k": mixer.head_dim, "v": mixer.value_dim, "g": mixer.gate_width}
    return {**_projections(mixer, **widths), f"{norm}.weight": mixer.norm_weight}


def _retnet(mixer: Any) -> Weights:
    return _stateful(mixer, "g_norm_swish_gate" if mixer.mixer_config.output_gate else "g_norm")


def _linear_attention(mixer: Any) -> Weights:
    return _stateful(mixer, "norm")


def _based(mixer: Any) -> Weights:
    width = mixer.mixer_config.feature_dim
    return _projections(mixer, q=width, k=width, v=mixer.head_dim)


def _key_value(mixer: Any) -> Weights:
    return _projections(mixer, q=mixer.output_width(), k=mixer.head_dim, v=mixer.head_dim)


LAYERS: dict[str, tuple[str, Callable[[Any], Weights]]] = {
    "attention": ("attn.Attention", _key_value),
    "based": ("based.BasedLinearAttention", _based),
    "deltanet": ("delta_net.DeltaNet", converted),
    "gated_deltanet": ("gated_deltanet.GatedDeltaNet", converted),
    "gla": ("gla.GatedLinearAttention", converted),
    "linear_attention": ("linear_attn.LinearAttention", _linear_attention),
    "mamba": ("mamba.Mamba", converted),
    "mamba2": ("mamba2.Mamba2", converted),
    "moba": ("moba.MoBA", _key_value),
    "nsa": ("nsa.NativeSparseAttention", converted),
    "retnet": ("multiscale_retention.MultiScaleRetention", _retnet),
}
"""Layer of fla for each mixer, and the function that computes its weights from those of the mixer."""


@dataclass(frozen=True)
class Case:
    """Settings of a mixer and of fla's layer that must give equal functions."""

    mixer: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.mixer, *(f"{name}={value}" for name, value in self.ours.items())])


NARROW = {"expand_v": 1, "output_gate": False}
WIDE_HEADS = {"head_dim": 2 * HEAD_DIM, "state_size": 5, "chunk_size": 4}
CASES = [
    Case("attention"),
    Case("attention", {"groups": 2, "window": 5}, {"num_kv_heads": 2, "window_size": 5}),
    # fla adds 1e-6 to the sum of weights, which is negligible: the sum is at least half the number of keys.
    Case("based", {}, {"num_key_value_heads": HEADS}),
    Case("based", {"feature_dim": 5}, {"num_key_value_heads": HEADS, "feature_dim": 5}),
    Case("deltanet"),
    Case(
        "deltanet",
        {"expand_v": 2, "output_gate": True, "conv_kernel_size": 3},
        {"expand_v": 2, "use_gate": True, "conv_size": 3},
    ),
    Case("gated_deltanet", {}, {"head_dim": HEAD_DIM, "expand_v": 1}),
    Case(
        "gated_deltanet",
        {"expand_v": 2, "output_gate": False, "conv_kernel_size": 3},
        {"head_dim": HEAD_DIM, "expand_v": 2, "use_gate": False, "conv_size": 3},
    ),
    Case("gla", {}, {"expand_k": 1.0, "expand_v": 2.0}),
    Case(
        "gla",
        {**NARROW, "decay_rank": 3, "decay_temperature": 2},
        {"expand_k": 1.0, "use_output_gate": False, "gate_low_rank_dim": 3, "gate_logit_normalizer": 2},
    ),
    Case("linear_attention", {}, {"feature_map": "elu"}),
    Case("linear_attention", {"feature_map": "identity"}, {"feature_map": "identity"}),
    Case("linear_attention", {"feature_map": "relu", "expand_v": 2}, {"feature_map": "relu", "expand_v": 2}),
    Case("mamba", {}, {"intermediate_size": 2 * HIDDEN}),
    # One group, or one per head: otherwise fla's plain form assigns groups to heads cyclically, unlike its kernels.
    Case("mamba2", {"groups": 1, "state_size": 5}, {"n_groups": 1, **WIDE_HEADS}),
    Case("mamba2", {"groups": HEADS, "state_size": 5}, {"n_groups": HEADS, **WIDE_HEADS}),
    # One key head per query head: fla's op has no groups.
    Case("moba", {"block_size": 2, "top_k": 3}, {"moba_chunk_size": 2, "moba_topk": 3}),
    # fla requires groups of at least 16 heads.
    Case(
        "nsa",
        {"heads": 16, "groups": 1, "block_size": 2, "num_selected": 4, "window": 3},
        {"num_heads": 16, "num_kv_heads": 1, "head_dim": HEAD_DIM}
        | {"block_size": 2, "block_counts": 4, "window_size": 3},
    ),
    Case("retnet"),
    Case("retnet", NARROW, {"expand_v": 1.0, "use_output_gate": False}),
]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    replace(monkeypatch, PLAIN)


def _layer(case: Case) -> Any:
    path, _ = LAYERS[case.mixer]
    heads = {} if case.mixer == "mamba" else {"num_heads": HEADS}
    return fla(f"layers.{path}")(**{"hidden_size": HIDDEN} | heads | case.theirs)


# With small inputs norms divide by small numbers, so a different epsilon than fla's would show.
@pytest.mark.parametrize("size", [1.0, 0.01])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_equal_fla(make_mixer: MakeMixer, hidden_states: Tensor, case: Case, size: float) -> None:
    mixer, layer, (_, weights) = make_mixer(case.mixer, **case.ours), _layer(case), LAYERS[case.mixer]
    if case.mixer == "moba":
        layer.o_norm = torch.nn.Identity()  # norm of each head's output: an addition of fla, not in the paper
    assert_same_function(mixer, layer, weights(mixer), size * hidden_states)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parameter_counts_equal_fla(make_mixer: MakeMixer, case: Case) -> None:
    theirs = sum(p.numel() for p in _layer(case).parameters())
    if case.mixer == "moba":
        theirs -= HEAD_DIM  # weight of that norm
    assert make_mixer(case.mixer, **case.ours).num_parameters() == theirs


def test_all_fla_mixers_are_compared() -> None:
    elsewhere = {"rwkv6", "rwkv7"}
    assert {case.mixer for case in CASES} == set(LAYERS) == set(peers.LAYERS) - elsewhere
