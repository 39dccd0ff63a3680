"""Properties of every mixer: causality, registration, and operation counts derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import megatron_ext.mixers
from megatron_ext.mixers.core.base import Mixer, MixInput
from megatron_ext.mixers.core.history import ContextParallelHistory
from megatron_ext.mixers.core.registry import MIXERS, load_all, register
from megatron_ext.parallel.aligned_linear import MULTIPLE
from megatron_ext.parallel.states import DiagonalScan, Scan

MakeMixer = Callable[..., Any]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("attention", {}),
    ("attention", {"window": 3}),
    ("attention", {"position_encoding": "alibi"}),
    ("attention", {"random_keys": True}),
    ("top1_element", {}),
    ("top1_element", {"estimator": "selected"}),
    ("top1_chunk", {"chunk_size": 4, "score": "approx"}),
    ("top1_chunk", {"chunk_size": 4, "score": "exact"}),
    ("top1_chunk", {"chunk_size": 4, "score": "exact_lse", "top_k": 2}),
    ("based", {}),
    ("deltanet", {}),
    ("gated_deltanet", {}),
    ("gla", {}),
    ("linear_attention", {}),
    ("mamba", {}),
    ("mamba", {"state_size": 3, "expand": 1, "conv_kernel_size": 2, "dt_rank": 1}),
    ("mamba2", {}),
    ("mamba2", {"groups": 2, "decay": "fixed"}),
    ("mamba2", {"decay": "none", "convolution": False, "group_norm": False}),
    ("moba", {"block_size": 4, "top_k": 2}),
    ("nsa", {"block_size": 2, "num_selected": 4, "window": 2}),
    ("nsa", {"block_size": 4, "num_selected": 2, "window": 3, "position_encoding": "none"}),
    ("retnet", {}),
    ("rwkv6", {}),
    ("rwkv6", {"mix_rank": 2, "decay_rank": 3}),
    ("rwkv7", {}),
    ("rwkv7", {"decay_rank": 2, "rate_rank": 3, "gate_rank": 4}),
]
VARIANTS += [(name, {}) for name in sorted(set(load_all()) - {name for name, _ in VARIANTS})]


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_outputs_are_causal(make_mixer: MakeMixer, hidden_states: Tensor, name: str, fields: dict[str, Any]) -> None:
    mixer = make_mixer(name, **fields)
    before = mixer(hidden_states)[0]
    for changed in (1, 7, 12):
        other = hidden_states.clone()
        other[changed] += 1.0
        after = mixer(other)[0]
        torch.testing.assert_close(after[:changed], before[:changed], rtol=1e-6, atol=1e-6)
        assert not torch.isclose(after[changed], before[changed]).all()


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_gradients_are_causal(make_mixer: MakeMixer, hidden_states: Tensor, name: str, fields: dict[str, Any]) -> None:
    x = hidden_states.clone().requires_grad_()
    make_mixer(name, **fields)(x)[0][6].sum().backward()
    assert x.grad is not None
    assert float(x.grad[7:].abs().max()) == 0.0
    assert float(x.grad[6].abs().max()) > 0.0


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_samples_are_independent(
    make_mixer: MakeMixer, hidden_states: Tensor, name: str, fields: dict[str, Any]
) -> None:
    mixer = make_mixer(name, **fields)
    alone = torch.cat([mixer(sample)[0] for sample in hidden_states.split(1, dim=1)], 1)
    torch.testing.assert_close(mixer(hidden_states)[0], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "fields"), VARIANTS)
def test_feature_widths(make_mixer: MakeMixer, hidden_states: Tensor, name: str, fields: dict[str, Any]) -> None:
    mixer = make_mixer(name, **fields)
    first, *more = (x.shape[-1] for x in mixer.features(hidden_states))
    padding = 0 if more else -mixer.head_group_width() % MULTIPLE
    assert first + sum(more) == mixer.head_group_width() + padding


def test_all_modules_register_mixers() -> None:
    files = {path.stem for path in Path(megatron_ext.mixers.__path__[0]).glob("*.py")} - {"__init__"}
    modules = {entry.module.__module__.rpartition(".")[2] for entry in load_all().values()}
    assert files == modules
    for name, entry in MIXERS.items():
        assert entry.name == name
        assert issubclass(entry.module, Mixer)
        assert entry.config_type() == entry.config_type()  # every field has a default


def test_duplicate_name_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = load_all()["attention"]
    with pytest.raises(ValueError, match="two mixers are called 'attention'"):
        register("attention", entry.config_type)(entry.module)
    assert MIXERS["attention"] is entry
    with pytest.raises(KeyError):
        MIXERS["no such mixer"]


@pytest.mark.parametrize(
    ("chosen", "length", "size", "heads"),
    [
        ("heads", 5, 2, True),
        ("states", 4, 2, False),
        ("auto", 4, 2, True),
        ("auto", 5, 2, False),
        ("auto", 4, 3, False),
    ],
)
def test_context_parallel_exchange(
    make_mixer: MakeMixer, monkeypatch: pytest.MonkeyPatch, chosen: str, length: int, size: int, heads: bool
) -> None:
    """Each of 2 ranks receives half of a head's 24 + 6 features, or a summary of 6 * (6 + 6): 15 * length or 72."""
    mixer = make_mixer("retnet", expand_v=1)
    monkeypatch.setattr(mixer, "cp_size", size)
    monkeypatch.setattr(mixer.config, "context_exchange", chosen)
    assert mixer.exchanges_heads(length) == heads


@pytest.mark.parametrize(
    ("chosen", "score", "heads", "groups", "size", "length", "exchanges_heads"),
    [
        # Each of 2 ranks receives half of a group's queries, key, value and outputs. Or it receives at most a key and a
        # value, and another key or a chunk's mean. Per position that is (2 + 2 R) / 2, or 3, or 2 + 1 / 4.
        ("auto", "exact", 4, 2, 2, 8, True),
        ("auto", "exact", 6, 2, 2, 8, False),
        ("auto", "approx", 4, 4, 2, 8, True),
        ("auto", "approx", 4, 2, 2, 8, False),
        ("states", "approx", 4, 2, 2, 8, False),
        ("heads", "approx", 4, 2, 2, 8, True),
        ("chunks", "exact", 4, 4, 2, 8, False),
        ("chunks", "exact", 4, 1, 2, 8, False),  # a group is not divisible
        ("auto", "approx", 4, 2, 2, 10, True),  # a chunk would span two ranks
    ],
)
def test_context_parallel_chunk_fetch(
    make_mixer: MakeMixer,
    monkeypatch: pytest.MonkeyPatch,
    chosen: str,
    score: str,
    heads: int,
    groups: int,
    size: int,
    length: int,
    exchanges_heads: bool,
) -> None:
    mixer = make_mixer("top1_chunk", heads=heads, groups=groups, chunk_size=4, score=score)
    monkeypatch.setattr(mixer, "cp_size", size)
    monkeypatch.setattr(mixer.config, "context_exchange", chosen)
    assert mixer.exchanges_heads(length) == exchanges_heads


class _Widths(ContextParallelHistory):
    """Past of a rank that records the width of the values in each scan, relative to the mixer's width."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group)
        self.seen: list[float] = []

    def scan(self, name: str, scan: Scan, v_bthe: Tensor, key_dim: int) -> Tensor:
        def noted(values: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            self.seen.append(values.shape[-1] / v_bthe.shape[-1])
            return scan(values, state)

        return super().scan(name, noted, v_bthe, key_dim)

    def scan_diagonal(self, name: str, scan: DiagonalScan, kept: Tensor) -> Tensor:
        def noted(state: Tensor | None) -> tuple[Tensor, Tensor]:
            self.seen.append(1.0)
            return scan(state)

        return super().scan_diagonal(name, noted, kept)


@pytest.mark.parametrize(
    ("name", "fields"), [(name, fields) for name, fields in VARIANTS if load_all()[name].traits.supports_state_passing]
)
def test_summary_scans(
    make_mixer: MakeMixer, hidden_states: Tensor, one_process: Any, name: str, fields: dict[str, Any]
) -> None:
    mixer = make_mixer(name, **fields)
    history = _Widths(one_process.cp)
    first, *more = mixer.features(hidden_states)
    mixer.mix(
        first, MixInput(0, mixer.num_head_groups(), 0, history, mixer.shared_features(hidden_states), tuple(more))
    )
    assert sum(history.seen) == pytest.approx(1 + mixer.summary_scans())


LENGTH, HEADS, WIDTH, HIDDEN = 12, 4, 6, 24


def _pairs(seen: Callable[[int, int], bool]) -> float:
    """Mean number of keys per query, at or before it, for which `seen` is true."""
    return sum(seen(t, s) for t in range(LENGTH) for s in range(t + 1)) / LENGTH


@pytest.mark.parametrize("window", [None, 1, 5, 12, 30])
def test_attention_flops(make_mixer: MakeMixer, window: int | None) -> None:
    mixer = make_mixer("attention", window=window)
    pairs = _pairs(lambda t, s: window is None or t - s < window)
    assert mixer.mixing_flops(LENGTH) == pytest.approx(HEADS * pairs * (2 * WIDTH + 2 * WIDTH))


def test_top1_element_flops(make_mixer: MakeMixer) -> None:
    """Count one score per pair. Selecting a value needs no multiplication."""
    pairs = _pairs(lambda t, s: True)
    assert make_mixer("top1_element").mixing_flops(LENGTH) == pytest.approx(HEADS * pairs * 2 * WIDTH)


@pytest.mark.parametrize("expand_v", [1, 2])
@pytest.mark.parametrize("name", ["deltanet", "gated_deltanet"])
def test_delta_rule_flops(make_mixer: MakeMixer, name: str, expand_v: int) -> None:
    mixer = make_mixer(name, expand_v=expand_v)
    # Read with the key, write, and read with the query.
    assert mixer.mixing_flops(LENGTH) == pytest.approx(HEADS * 3 * 2 * WIDTH * WIDTH * expand_v)
    assert mixer.mixing_flops(10 * LENGTH) == mixer.mixing_flops(LENGTH)


@pytest.mark.parametrize("expand_v", [1, 3])
@pytest.mark.parametrize("name", ["linear_attention", "retnet", "gla"])
def test_additive_state_flops(make_mixer: MakeMixer, name: str, expand_v: int) -> None:
    """Count a write and a read of the state."""
    mixer = make_mixer(name, expand_v=expand_v)
    assert mixer.mixing_flops(LENGTH) == pytest.approx(HEADS * 2 * 2 * WIDTH * WIDTH * expand_v)


@pytest.mark.parametrize("width", [3, 16])
def test_based_flops(make_mixer: MakeMixer, width: int) -> None:
    """Count write and read of a state over products of at most two features. The normalizer acts as one more value."""
    products = sum(1 for i in range(width + 1) for j in range(i + 1))
    mixer = make_mixer("based", feature_dim=width)
    assert mixer.mixing_flops(LENGTH) == pytest.approx(HEADS * 2 * 2 * products * (WIDTH + 1))


def test_rwkv6_flops(make_mixer: MakeMixer) -> None:
    """Count write and read, and for the current token the weight (sum of r * u * k) and its product with the value."""
    by_hand = HEADS * (2 * 2 * WIDTH * WIDTH + 3 * WIDTH + 2 * WIDTH)
    assert make_mixer("rwkv6").mixing_flops(LENGTH) == pytest.approx(by_hand)


def test_rwkv7_flops(make_mixer: MakeMixer) -> None:
    """Count read and removal of old content, write and read, and the current token as in RWKV-6."""
    by_hand = HEADS * (4 * 2 * WIDTH * WIDTH + 3 * WIDTH + 2 * WIDTH)
    assert make_mixer("rwkv7").mixing_flops(LENGTH) == pytest.approx(by_hand)


def test_moba_flops(make_mixer: MakeMixer) -> None:
    chunks = make_mixer("top1_chunk", chunk_size=8, top_k=2, score="approx").mixing_flops(4096)
    assert make_mixer("moba", block_size=8, top_k=3).mixing_flops(4096) == chunks


@pytest.mark.parametrize("score", ["approx", "exact", "exact_lse"])
@pytest.mark.parametrize("local", [True, False])
def test_top1_chunk_flops(make_mixer: MakeMixer, score: str, local: bool) -> None:
    """Compare with a count over whole chunks. The formula assumes that a query sees half of its own chunk."""
    size, length, top_k = 8, 4096, 2
    mixer = make_mixer("top1_chunk", chunk_size=size, top_k=top_k, score=score, local=local)
    attended = scored = 0
    for t in range(length):
        before = t // size
        attended += min(top_k, before) * size + (t % size + 1 if local else 0)
        scored += before if score == "approx" else before * size
    by_hand = HEADS * (attended * 2 * 2 * WIDTH + scored * 2 * WIDTH) / length
    assert mixer.mixing_flops(length) == pytest.approx(by_hand, rel=0.03)


SQUARE = HIDDEN * HEADS * WIDTH  # a projection of the hidden state to all heads, or back
PARAMETERS = {
    "attention": 4 * SQUARE,
    "top1_element": 4 * SQUARE,
    "top1_chunk": 4 * SQUARE,
    "moba": 4 * SQUARE,
    "nsa": 4 * SQUARE + 3 * HEADS * HIDDEN,
    # q, k, v, o; beta; four taps per channel; one norm for all heads.
    "deltanet": 4 * SQUARE + HEADS * HIDDEN + 4 * 3 * HEADS * WIDTH + WIDTH,
    # A gate; beta and alpha; a decay and a bias per head.
    "gated_deltanet": 5 * SQUARE + 2 * HEADS * HIDDEN + 4 * 3 * HEADS * WIDTH + 2 * HEADS + WIDTH,
    "linear_attention": 4 * SQUARE + WIDTH,
    "based": 2 * SQUARE + 2 * 16 * HEADS * HIDDEN,
    # Values, gate and output are twice as wide.
    "retnet": 8 * SQUARE + 2 * WIDTH,
    "gla": 8 * SQUARE + 2 * WIDTH + 16 * HIDDEN + 16 * HEADS * WIDTH + HEADS * WIDTH,
    # Channels twice as wide: x, z, o; taps and bias; steps from 2 numbers, B and C of 16; A of 16, D and a bias.
    "mamba": 6 * SQUARE + 2 * HEADS * WIDTH * (4 + 1 + (2 + 2 * 16) + 2 + 16 + 1 + 1),
    # Bonus, decay, norm; the mixtures' own weights, in and out of 32; the decays', in and out of 64.
    "rwkv6": 5 * SQUARE + 4 * HEADS * WIDTH + 6 * HIDDEN + 5 * 32 * 2 * HIDDEN + 64 * (HIDDEN + HEADS * WIDTH),
    # Seven vectors; three narrow projections of 32.
    "rwkv7": 4 * SQUARE + 7 * HEADS * WIDTH + 6 * HIDDEN + 3 * 32 * (HIDDEN + HEADS * WIDTH),
    # x, z, o; B and C of 128 per group; steps; taps and bias; decay, bias and skip per head; a norm weight per channel.
    "mamba2": 6 * SQUARE
    + 2 * 128 * HEADS * HIDDEN
    + HEADS * HIDDEN
    + (2 * HEADS * WIDTH + 2 * 128 * HEADS) * (4 + 1)
    + 3 * HEADS
    + 2 * HEADS * WIDTH,
}


def test_parameters(make_mixer: MakeMixer) -> None:
    """Parameter counts with default settings equal those derived by hand."""
    assert set(PARAMETERS) == set(load_all())
    found = {name: make_mixer(name) for name in PARAMETERS}
    assert {name: mixer.num_parameters() for name, mixer in found.items()} == PARAMETERS
    assert {name: sum(p.numel() for p in mixer.parameters()) for name, mixer in found.items()} == PARAMETERS
