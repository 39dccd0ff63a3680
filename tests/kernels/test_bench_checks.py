"""Checks in the benchmark of kernels: correct results pass and are timed, wrong ones are reported and never timed."""

import math
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend

from kernels.bench import checks, ours, peers
from kernels.bench.cases import KernelPlan, Shape
from kernels.bench.contestant import Contestant, NotRun, TimedPart
from kernels.bench.costs import Operations
from kernels.bench.inputs import make_inputs
from kernels.bench.run import bench
from kernels.bench.timing import Ceilings, Times, quantiles

CPU = torch.device("cpu")
SHAPE = Shape(batch=2, length=150, heads=4, groups=2, head_dim=16)
CHUNK = 16


class FakeMeter:
    def __init__(self):
        self.timed = 0

    def ceilings(self):
        return Ceilings(1e12, 1e12)

    def time(self, run):
        run()
        self.timed += 1
        return Times(2.0, 1.0, 3.0)

    def new_bytes(self, run):
        run()
        return 2**20


def plan(**changes):
    defaults = {
        "shapes": (SHAPE,), "ops": (), "peers": (), "passes": ("forward", "forward_backward"), "choices": "even",
        "repeat": 3, "chunk_size": CHUNK, "top_k": 1, "seed": 5, "output": Path("out"),
    }  # fmt: skip
    return KernelPlan(**(defaults | changes))


def draw(shape, choices="even", seed=3):
    return make_inputs(shape, choices, CHUNK, seed, CPU)


def chunk_builder(score="exact", top_k=1):
    return partial(ours.top1_chunk, score=score, chunk_size=CHUNK, top_k=top_k, implementation="reference")


def element_builder(estimator):
    return partial(ours.top1_element, estimator=estimator, chunk_size=CHUNK, implementation="reference")


def changed(build, change):
    """Return a builder whose contestant's result (output, choices) is modified by `change`."""

    def changed_build(shape):
        contestant = build(shape)
        (part,) = contestant.parts

        def run(q, k, v):
            return change(*part.run(q, k, v))

        return replace(contestant, parts=(replace(part, run=run),))

    return changed_build


CORRECT = {
    "approx": chunk_builder("approx"),
    "exact": chunk_builder("exact"),
    "exact_lse": chunk_builder("exact_lse"),
    "top 3": chunk_builder("exact", top_k=3),
    "straight_through": element_builder("straight_through"),
    "selected": element_builder("selected"),
    "sdpa": partial(peers.sdpa, backend=SDPBackend.MATH),
}


@pytest.mark.parametrize("name", CORRECT)
def test_correct_results_pass(name):
    verdict = checks.check(CORRECT[name], SHAPE, draw, gradients=True)
    assert (verdict.failure, verdict.gradient_failure) == (None, None)
    assert set(verdict.errors) == {"output", "dq", "dk", "dv"}
    assert all(0 < verdict.errors[gradient] < 5e-3 for gradient in ("dq", "dk", "dv"))
    assert (verdict.errors["output"] == 0) == (name in ("straight_through", "selected"))
    assert verdict.worst <= 1
    if name != "sdpa":
        # Two checks: one of sampled rows (blocks of 16), and one of the gradients with all rows.
        rows = sum(end - start for start, end in checks.sample_blocks(SHAPE.length))
        assert verdict.choices >= (SHAPE.length + min(rows, 64)) * 2 * 4
        assert 0 < verdict.largest_share < 1


@pytest.mark.parametrize("name", ["exact", "straight_through"])
def test_sequence_of_one_chunk(name):
    verdict = checks.check(CORRECT[name], replace(SHAPE, length=5), draw, gradients=True)
    assert (verdict.failure, verdict.gradient_failure) == (None, None)


def error_in_one_row(out, chosen):
    out = out.clone()
    out[0, -1, 1] += 1
    return out, chosen


def not_a_number(out, chosen):
    out = out.clone()
    out[1, 0, 0, 0] = math.nan
    return out, chosen


def second_best(out, chosen):
    return out, torch.where(chosen > 0, chosen - 1, chosen)


def own_chunk(out, chosen):
    return out, torch.arange(out.shape[1])[None, :, None, None].div(CHUNK, rounding_mode="floor").expand_as(chosen)


def none_at_all(out, chosen):
    return out, torch.full_like(chosen, -1)


def future_key(out, chosen):
    return out, chosen + 1


@pytest.mark.parametrize(
    ("name", "change", "expected_message"),
    [
        ("exact", error_in_one_row, "output off by "),
        ("sdpa", error_in_one_row, "output off by "),
        ("exact", not_a_number, "output off by nan"),
        ("straight_through", not_a_number, "output off by nan"),
        ("exact", second_best, "are wrong: 0 are impossible, others differ by up to "),
        ("approx", second_best, "are wrong: 0 are impossible, others differ by up to "),
        ("exact", own_chunk, "choices at "),
        ("exact", none_at_all, " are impossible, others differ by up to 0.0e+00 times the rounding bound"),
        ("straight_through", future_key, "choices at "),
        ("straight_through", lambda out, chosen: (out * 1.01, chosen), "output off by "),
    ],
)
def test_wrong_results_are_not_timed(name, change, expected_message):
    meter = FakeMeter()
    report = bench(plan(), meter, CPU, progress=lambda _: None, builders={"ours": changed(CORRECT[name], change)})
    assert meter.timed == 0
    assert [expected_message in row.failed for row in report.rows] == [True, True]
    assert report.failures == report.rows
    assert report.rows[0].summary.startswith("failed: ")


def test_repeated_choice_is_wrong():
    def twice(out, chosen):
        return out, torch.cat([chosen[..., :1], chosen[..., :1], chosen[..., 2:]], dim=-1)

    verdict = checks.check(changed(CORRECT["top 3"], twice), SHAPE, draw, gradients=False)
    assert "choices" in verdict.failure


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[0, 7] *= -1
        return grad


def test_wrong_gradient_fails_only_the_backward_pass():
    meter = FakeMeter()
    wrong = changed(CORRECT["exact"], lambda out, chosen: (WrongGradient.apply(out), chosen))
    report = bench(plan(), meter, CPU, progress=lambda _: None, builders={"ours": wrong})
    forward, both = report.rows
    assert forward.measured is not None
    assert "off by" in both.failed
    assert both.failed.startswith("d")
    assert meter.timed == 1
    assert len(report.failures) == 1


def test_choices_within_rounding_pass_and_are_counted():
    """Two chunks have equal keys. The choice is the later one, but their scores cannot be distinguished."""
    q, k = (x.double() for x in draw(SHAPE)[:2])
    k[:, CHUNK : 2 * CHUNK] = k[:, :CHUNK]
    for score in ours.ROUNDING:
        best = ours.select_chunks(q, k, chunk_size=CHUNK, top_k=1, score=score, scale=0.25, query_offset=0)
        other = best.where(best != 0, 1).where(torch.arange(150)[None, :, None, None] >= 2 * CHUNK, best)
        found = ours.compare_chunks(q, k, other, score=score, chunk_size=CHUNK, query_offset=0)
        assert found.compared == best.numel()
        assert found.different == int((best != other).sum()) > 0
        assert (found.wrong, found.impossible, found.worst) == (0, 0, 0)


def test_exceptions_of_peers_and_of_our_ops():
    def refuse(shape):
        raise NotRun("wants other heads")

    def crash(*_):
        raise RuntimeError("no kernel\nsecond line")

    def build(shape):
        part = TimedPart(run=crash, reference=crash)
        return Contestant(run=crash, parts=(part,), operations=Operations(1, 1))

    lines = []
    report = bench(
        plan(passes=("forward",)), FakeMeter(), CPU, progress=lines.append,
        builders={"nsa": refuse, "sdpa_flash": build, "top1_chunk:exact": build},
    )  # fmt: skip
    assert [row.summary for row in report.rows] == [
        "not run: wants other heads",
        "not run: RuntimeError: no kernel",
        "failed: RuntimeError: no kernel",
    ]
    assert lines[0] == "4x16 (2 kv) 150x2 nsa: not run: wants other heads".replace("nsa", "nsa forward")
    assert [row.name for row in report.failures] == ["top1_chunk:exact"]


def test_extra_memory():
    saved = []
    report = bench(
        plan(), FakeMeter(), CPU, progress=lambda _: None, save=lambda report: saved.append(len(report.rows)),
        builders={"top1_chunk:exact": CORRECT["exact"]},
    )  # fmt: skip
    q, k = 2 * 2 * 150 * 4 * 16, 2 * 2 * 150 * 2 * 16
    forward, both = (row.measured for row in report.rows)
    assert forward.extra_memory == pytest.approx((2**20 - q) / (2 * q + 2 * k))
    assert both.extra_memory == pytest.approx((2**20 - 2 * q - 2 * k) / (4 * q + 4 * k))
    assert saved == [0, 2]


def test_contestants_by_name():
    """Names in a plan resolve to our public ops, here in plain torch."""
    report = bench(
        plan(ops=("top1_chunk:approx", "top1_element:selected"), peers=("nsa",), passes=("forward",)),
        FakeMeter(), CPU, progress=lambda _: None,
    )  # fmt: skip
    assert [row.name for row in report.rows] == ["nsa", "top1_chunk:approx", "top1_element:selected"]
    assert report.rows[0].not_run is not None
    assert [row.measured is not None for row in report.rows] == [False, True, True]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_window_matches_its_reference():
    build = partial(peers.flex_window, window=32, compiled=False)
    verdict = checks.check(build, replace(SHAPE, length=130, batch=1), draw, gradients=False)
    assert verdict.failure is None


def plain_nsa(q, k, v, g_cmp=None, g_slc=None, block_indices=None, block_counts=None, block_size=64):
    """fla's native sparse attention, written as loops. Its block selection is arbitrary, because it is not checked."""
    batch, length, heads, dim = q.shape
    ratio = heads // k.shape[2]
    out = torch.zeros_like(q)
    for b in range(batch):
        for t in range(length):
            for h in range(heads):
                g, complete = h // ratio, (t + 1) // block_size
                if g_cmp is None or float(g_slc[b, t, h]) > 0:
                    blocks = block_indices if block_indices is not None else peers.spread_blocks(q, k)
                    seen = [s for c in blocks[b, t, g].tolist() if c >= 0 for s in range(c * block_size, length)
                            if s // block_size == c and s <= t]  # fmt: skip
                    p = (k[b, seen, g].float() @ q[b, t, h].float() * dim**-0.5).softmax(0)
                    out[b, t, h] += (p @ v[b, seen, g].float()).to(q.dtype)
                if g_cmp is not None and complete:
                    means = [
                        x[b, : complete * block_size, g].float().unflatten(0, (complete, -1)).mean(1) for x in (k, v)
                    ]
                    p = (means[0] @ q[b, t, h].float() * dim**-0.5).softmax(0)
                    out[b, t, h] += (p @ means[1]).to(q.dtype)
    return out


def test_both_parts_of_nsa_are_checked(monkeypatch):
    for name in ("fla", "fla.ops", "fla.ops.nsa"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(peers, "find_spec", lambda name: object())
    sys.modules["fla.ops.nsa"].parallel_nsa = plain_nsa
    shape = Shape(batch=1, length=140, heads=16, groups=1, head_dim=8)
    monkeypatch.setattr(peers, "NSA_NUM_SELECTED", 2)
    verdict = checks.check(peers.nsa, shape, draw, gradients=False)
    assert verdict.failure is None
    with pytest.raises(NotRun, match="per key head, not 4"):
        peers.nsa(Shape(batch=1, length=64, heads=16, groups=4, head_dim=8))
    sys.modules["fla.ops.nsa"].parallel_nsa = lambda *tensors, **options: 1.1 * plain_nsa(*tensors, **options)
    assert checks.check(peers.nsa, shape, draw, gradients=False).failure.startswith("attention to given blocks off")


@pytest.mark.parametrize(("choices", "low", "high"), [("even", 0.05, 0.5), ("zipf", 0.15, 0.75), ("same", 0.999, 1.0)])
@pytest.mark.parametrize("score", ["approx", "exact"])
def test_distribution_of_choices(choices, low, high, score):
    shape = Shape(batch=1, length=64 * CHUNK, heads=4, groups=2, head_dim=32)
    q, k, _ = draw(shape, choices)
    assert q.dtype == torch.bfloat16
    chosen = ours.select_chunks(q, k, chunk_size=CHUNK, top_k=1, score=score, scale=1.0, query_offset=0)
    assert low <= checks.largest_share(chosen) <= high
    first, last = draw(shape, choices), draw(shape, choices, seed=4)
    assert all(x.equal(y) for x, y in zip(first, draw(shape, choices), strict=True))
    assert not first[0].equal(last[0])


def test_shares_errors_and_quantiles():
    chosen = torch.tensor([[[-1], [0], [0], [1]], [[-1], [2], [1], [0]]]).transpose(0, 1)[None]
    assert checks.largest_share(chosen) == pytest.approx(2 / 3)
    assert checks.largest_share(torch.full((1, 4, 2, 1), -1)) is None
    expected = torch.ones(1, 4, 2, 1, dtype=torch.float64)
    found = expected.clone()
    found[0, 0, 1] = 1.5
    assert checks.relative_error(found, expected) == pytest.approx(0.25)
    long = torch.ones(1, 2 * checks.ERROR_ROWS, 2, 4)
    one_off = long.clone()
    one_off[0, -1, 0] = 0
    assert checks.relative_error(one_off, long) == pytest.approx(checks.ERROR_ROWS**-0.5)
    assert math.isnan(checks.relative_error(found * math.nan, expected))
    assert checks.relative_error(0 * found, 0 * expected) == 0
    assert checks.relative_error(found, 0 * expected) == math.inf
    assert quantiles([float(i) for i in range(11)]) == Times(5.0, 2.0, 8.0)


def test_query_blocks_cover_each_head_once(monkeypatch):
    monkeypatch.setattr(checks, "MAX_SCORE_BYTES", 8 * 2 * 10 * 20 * 3)
    shape = Shape(batch=2, length=20, heads=10, groups=5, head_dim=4)
    found = [
        (b.row, b.groups.start, b.groups.stop, b.heads.start, b.heads.stop) for b in checks.query_blocks(shape, 10, 20)
    ]
    assert found == [(0, 0, 3, 0, 6), (0, 3, 5, 6, 10), (1, 0, 3, 0, 6), (1, 3, 5, 6, 10)]
    blocks = checks.sample_blocks(1000)
    assert blocks[0] == (0, 16)
    assert blocks[-1] == (984, 1000)
    assert (120, 136) in blocks
