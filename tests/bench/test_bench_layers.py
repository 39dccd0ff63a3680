"""Benchmark of layers: right results are timed, wrong ones rejected, and fla's layers have our settings."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from built_in import MIXERS

from kernels.bench.contestant import NotRun
from kernels.common.dispatch import plain_torch, recorded_choices
from megatron_ext.bench.layers import ours, peers
from megatron_ext.bench.layers.cases import SIZES, LayerPlan, LayerShape
from megatron_ext.bench.layers.layer import Layer, hidden_states, training_pass
from megatron_ext.bench.layers.ours import Agreement
from megatron_ext.bench.layers.run import bench
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")


def plan(shape: LayerShape, **changes: Any) -> LayerPlan:
    usual = {"mixers": ("gla",), "shapes": (shape,), "peers": (), "repeat": 1, "seed": 5, "output": Path("out")}
    return LayerPlan(**(usual | changes))


@pytest.fixture(autouse=True)
def shared_process_group(monkeypatch: pytest.MonkeyPatch, one_process: Any) -> None:
    """Reuse the test's process group, as the run would create its own."""
    monkeypatch.setattr("megatron_ext.bench.layers.run.groups_of_one_process", lambda _: nullcontext(one_process))


def test_all_mixers_are_checked_and_timed(meter: Any, shape: LayerShape) -> None:
    lines: list[str] = []
    saved: list[int] = []
    names = tuple(sorted(load_all()))
    report = bench(
        plan(shape, mixers=names),
        meter,
        CPU,
        report_progress=lines.append,
        save=lambda report: saved.append(len(report.rows)),
    )
    assert [row.failed for row in report.rows] == [None] * len(names)
    assert [row.mixer for row in report.rows] == list(names)
    assert saved == list(range(len(names) + 1))
    assert len(lines) == 2 * len(names)
    assert tuple(lines[:2]) == ("tiny 70x2 attention ours ...", "tiny 70x2 attention ours: 2.00 ms")
    for row in report.rows:
        assert row.measured is not None
        assert row.agreement is not None
        assert row.agreement.failure is None
    attention = report.rows[0]
    # Four square matrices. Scores and weighted values of 35.5 keys, the mean that a query sees, for two heads.
    assert attention.flops == 6 * 4 * 32**2 + 3 * (4 * 2 * 16 * 35.5)
    assert all(row.choices for row in report.rows if row.mixer in MIXERS)
    assert attention.measured is not None
    assert attention.measured.parameters == 4 * 32**2


def test_wrong_gradient_is_not_timed(meter: Any, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_outside_of_plain_torch(monkeypatch, lambda out: out.detach() + 0.95 * (out - out.detach()))
    (row,) = bench(plan(shape), meter, CPU, report_progress=lambda _: None).rows
    assert row.failed == "gradient of the hidden states off by 5.0e-02 from plain torch, limit 2e-02"
    assert (meter.timed, row.measured) == (0, None)


def test_wrong_output_fails(meter: Any, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_outside_of_plain_torch(monkeypatch, lambda out: 1.03 * out)
    report = bench(plan(shape), meter, CPU, report_progress=lambda _: None)
    assert report.rows[0].failed == "output off by 3.0e-02 from plain torch, limit 2e-02"
    assert report.failures == report.rows


def test_check_is_repeated_with_other_input(meter: Any, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = iter([Agreement(1e-3, 3e-2), Agreement(2e-3, 1e-2)])
    monkeypatch.setattr(ours, "_check_once", lambda *_: next(draws))
    (row,) = bench(plan(shape), meter, CPU, report_progress=lambda _: None).rows
    assert (row.failed, row.agreement) == (None, Agreement(2e-3, 1e-2))


def wrong_outside_of_plain_torch(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Change GLA's output unless plain torch is requested, like a wrong fast implementation."""
    gla = load_all()["gla"].module
    right = gla.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with recorded_choices() as choices:
            out, bias = right(self, *args, **kwargs)
        plain = all(choice.reason == "plain torch requested" for _, choice in choices)
        return (out if plain else change(out)), bias

    monkeypatch.setattr(gla, "forward", forward)


@pytest.mark.parametrize("bad", [0.021, float("nan"), float("inf")])
def test_agreement_limits(bad: float) -> None:
    assert Agreement(0.0199, 0.0199).failure is None
    assert Agreement(bad, 0.0).failure is not None
    assert Agreement(0.0, bad).failure is not None


def test_exception_in_mixer_is_failure(meter: Any, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ext.mixers.gla.gated_linear_attention", lambda *_, **__: 1 / 0)
    first, second = bench(plan(shape, mixers=("gla", "retnet")), meter, CPU, report_progress=lambda _: None).rows
    assert first.failed == "ZeroDivisionError: division by zero"
    assert second.measured is not None


def test_unavailable_peer_is_reported(meter: Any, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(name: str, *_: object) -> Layer:
        raise NotRun("it rains") if name == "gla" else RuntimeError("no kernel\nof this size")

    monkeypatch.setattr(peers, "build", build)
    rows = bench(plan(shape, mixers=("gla", "retnet", "top1_chunk"), peers=("fla",)), meter, CPU).rows
    assert [(row.mixer, row.maker, row.not_run) for row in rows] == [
        ("gla", "ours", None),
        ("gla", "fla", "it rains"),
        ("retnet", "ours", None),
        ("retnet", "fla", "RuntimeError: no kernel"),
        ("top1_chunk", "ours", None),
    ]
    assert meter.timed == 3


def test_peer_input_is_batch_first(meter: Any, shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    weight = torch.nn.Parameter(torch.eye(shape.size.hidden, dtype=torch.bfloat16))

    def run(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return x @ weight

    layer = Layer(run=run, parameters=(weight,), sequence_first=False)
    monkeypatch.setattr(peers, "build", lambda *_: layer)
    _, row = bench(plan(shape, peers=("fla",)), meter, CPU, report_progress=lambda _: None).rows
    assert seen == [(2, 70, 32)]
    assert row.measured is not None
    assert row.measured.parameters == 32**2


def test_training_pass_returns_all_gradients() -> None:
    weight, unused = (torch.nn.Parameter(torch.randn(3, 3, dtype=torch.bfloat16)) for _ in range(2))
    layer = Layer(run=lambda x: x @ weight, parameters=(weight, unused), sequence_first=True)
    x = hidden_states(layer, length=4, batch=2, hidden=3, seed=1, device=CPU.device)
    assert x.shape == (4, 2, 3)
    torch.manual_seed(7)
    out, *gradients = training_pass(layer, x)()
    torch.manual_seed(7)
    grad = torch.randn_like(x)
    torch.testing.assert_close(out, x @ weight)
    torch.testing.assert_close(gradients[0], grad @ weight.T)
    torch.testing.assert_close(gradients[1], torch.einsum("tbi,tbj->ij", x, grad))
    assert gradients[2] is None


def test_weights_have_training_initialization(shape: LayerShape, one_process: Any) -> None:
    first, again, other = (ours.build("gated_deltanet", shape, CPU, one_process, seed) for seed in (1, 1, 2))
    weights = first.in_proj.weight.detach()
    assert torch.equal(weights, again.in_proj.weight)
    assert not torch.equal(weights, other.in_proj.weight)
    assert float(weights.float().std()) == pytest.approx(0.02, rel=0.1)
    assert float(first.out_proj.weight.detach().float().std()) == pytest.approx(0.02 / 2**0.5, rel=0.1)
    assert float(first.norm_weight.detach().min()) == 1.0
    assert first.conv_weight.abs().max() <= 0.5


def test_plain_torch_context(shape: LayerShape, one_process: Any) -> None:
    """Attention has a faster form even on a CPU."""
    mixer = ours.build("attention", shape, CPU, one_process, 1)
    x = torch.zeros(5, 1, 32, dtype=torch.bfloat16)
    ((_, before),) = ours.choices(lambda: mixer(x))
    with plain_torch():
        ((_, inside),) = ours.choices(lambda: mixer(x))
    ((_, after),) = ours.choices(lambda: mixer(x))
    assert (before.name, inside.name, after.name) == ("sdpa", "reference", "sdpa")


WITHOUT_FLASH_ATTENTION = sorted(set(peers.LAYERS) - {"attention", "moba"})


@pytest.mark.parametrize("name", WITHOUT_FLASH_ATTENTION)
@pytest.mark.filterwarnings("ignore")
def test_peer_has_as_many_parameters(name: str, one_process: Any) -> None:
    """Parameter counts differ at most by a bias or norm. A different width or gate would change them far more."""
    pytest.importorskip("fla")
    pytest.importorskip("transformers")
    small = LayerShape(size_name="small", size=SIZES["110m"]._replace(hidden=256, heads=4), length=64, batch=1)
    mixer = ours.build(name, small, CPU, one_process, 1)
    theirs = sum(p.numel() for p in peers.construct(name, small.size).parameters())
    assert theirs == pytest.approx(mixer.num_parameters(), rel=0.01)


def test_peers_are_named_after_mixers() -> None:
    assert set(peers.LAYERS) <= set(load_all())
    assert MIXERS - set(peers.LAYERS) == {"top1_chunk", "top1_element"}


def test_missing_fla(shape: LayerShape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda _: None)
    with pytest.raises(NotRun, match=r"^flash-linear-attention is not installed: pip install flash-linear-attention$"):
        peers.build("gla", shape, CPU.device)


@pytest.mark.filterwarnings("ignore")
def test_plain_fallback_of_fla_is_not_run(shape: LayerShape) -> None:
    pytest.importorskip("transformers")
    module = pytest.importorskip("fla.layers.mamba2")
    if module.is_fast_path_available:
        pytest.skip("mamba_ssm is installed")
    with pytest.raises(NotRun, match="mamba_ssm is not installed, and without it fla's layer is plain torch"):
        peers.build("mamba2", shape, CPU.device)


def test_long_sequence_is_checked_at_512_tokens(shape: LayerShape, one_process: Any) -> None:
    lengths: list[int] = []
    mixer = ours.build("linear_attention", shape, CPU, one_process, 1)
    mixer.register_forward_pre_hook(lambda _, inputs: lengths.append(len(inputs[0])))
    assert ours.check(mixer, replace(shape, length=100_000), 1, CPU.device).failure is None
    assert ours.check(mixer, shape, 1, CPU.device).failure is None
    assert lengths == [512, 512, 70, 70]
