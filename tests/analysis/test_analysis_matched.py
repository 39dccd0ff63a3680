"""Comparison at matched training loss: it recovers gaps of synthetic runs, with intervals of nominal coverage."""

import csv
import io

import coverage_of_documents
import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run
from covering import cases

from megatron_ext.analysis.matched import (
    RESOLUTION,
    compare,
    default_window,
    interpolation_weights,
    training_loss,
)
from megatron_ext.analysis.matched_spread import curve_slope
from megatron_ext.analysis.matched_tables import describe_unmatched, precision_table, render_table, verdicts
from megatron_ext.analysis.runs import read_run, read_runs

DELTA = {"pattern": "gated_deltanet*4"}


def comparison_of(tmp_path, *runs, **options):
    folders = [write_run(tmp_path / f"{index}", run) for index, run in enumerate(runs)]
    return compare(read_runs(folders), **options)


def test_recovers_a_constant_gap_at_every_level_and_domain(tmp_path):
    """Test loss is affine in training loss, so linear interpolation is exact at any training speed."""
    result = comparison_of(tmp_path, Synthetic(), Synthetic(**DELTA, gap=0.0375, speed=0.8))
    for domain in ("all", "code", "maths"):
        baseline, delta = result.select("test", domain)
        np.testing.assert_allclose(delta.gap.value, 0.0375, atol=1e-9)
        np.testing.assert_array_equal(baseline.gap.value, 0.0)
        np.testing.assert_array_equal(baseline.gap.error, 0.0)
    np.testing.assert_allclose(result.select("validation")[1].gap.value, 0.0, atol=1e-9)


def test_recovers_a_gap_that_grows(tmp_path):
    """A gap of 0.1 * (6 - x). Interpolation between evaluations is accurate to 1e-3 if the curve bends slowly."""

    class Bent(Synthetic):
        def test_loss(self, training_loss):
            return 1.3 * training_loss + 0.02 * training_loss**2 + 0.1 * (6.0 - training_loss)

    class Straight(Synthetic):
        def test_loss(self, training_loss):
            return 1.3 * training_loss + 0.02 * training_loss**2

    result = comparison_of(tmp_path, Straight(every=5, steps=300), Bent(**DELTA, speed=1.1, every=5, steps=300))
    gap = result.select("test")[1].gap.value
    np.testing.assert_allclose(gap, 0.1 * (6.0 - result.training_losses), atol=1e-3)


def test_loss_over_all_domains_is_weighted_by_tokens(tmp_path):
    result = comparison_of(tmp_path, Synthetic())
    pooled, code, maths = (result.select("test", name)[0] for name in ("all", "code", "maths"))
    expected = (code.loss.value * code.tokens + maths.loss.value * maths.tokens) / (code.tokens + maths.tokens)
    np.testing.assert_allclose(pooled.loss.value, expected, rtol=1e-12)
    assert (pooled.documents, pooled.tokens) == (50, code.tokens + maths.tokens)


def test_levels_span_the_overlap_and_end_at_the_lowest_common_loss(tmp_path):
    fast, slow = Synthetic(speed=1.3), Synthetic(**DELTA, speed=0.7)
    result = comparison_of(tmp_path, fast, slow)
    xs = [training_loss(read_run(tmp_path / name), result.window) for name in ("0", "1")]
    levels = result.training_losses[list(result.levels)]
    assert len(levels) == 6
    assert levels[0] == min(x.max() for x in xs)
    assert levels[-1] == result.training_losses[result.headline] == max(x.min() for x in xs)
    assert (np.diff(result.training_losses) < 0).all()


def test_training_loss_is_the_mean_of_the_window_before_the_evaluation(tmp_path):
    run = read_run(write_run(tmp_path / "run", Synthetic(noise=0.1)))
    assert default_window([run]) == 20
    expected = [run.losses[end - 7 : end].mean() for end in range(20, 201, 20)]
    np.testing.assert_allclose(training_loss(run, 7), expected, rtol=1e-12)


def test_window_is_the_shortest_stretch_between_evaluations_of_any_run(tmp_path):
    runs = [read_run(write_run(tmp_path / f"{every}", Synthetic(every=every))) for every in (50, 8)]
    assert default_window(runs) == 8
    assert default_window(runs[:1]) == 20


def test_interpolation_never_extrapolates():
    x = np.array([5.0, 3.0, 4.0])
    for outside in (5.0001, 2.9999):
        with pytest.raises(ValueError, match="not within the measured range"):
            interpolation_weights(x, np.array([4.0, outside]))


def test_interpolation_weights_against_numpy():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=9), generator.normal(size=9)
    at = np.linspace(x.min(), x.max(), 23)
    order = np.argsort(x)
    np.testing.assert_allclose(interpolation_weights(x, at) @ y, np.interp(at, x[order], y[order]), atol=1e-12)


def test_interpolation_averages_points_of_equal_training_loss():
    weights = interpolation_weights(np.array([4.0, 3.0, 4.0]), np.array([4.0, 3.5, 3.0]))
    np.testing.assert_allclose(weights, [[0.5, 0, 0.5], [0.25, 0.5, 0.25], [0, 1, 0]])


def test_no_common_training_loss(tmp_path):
    late = Synthetic(**DELTA, name="late", training_loss=lambda step: 9.0 - 0.001 * np.asarray(step))
    result = comparison_of(tmp_path, Synthetic(), late)
    assert not result.is_matched
    assert result.levels == ()
    assert {one.domain for one in result.select("test", "code")} == {"code"}  # domains are known without a match
    for one in result.measured:
        assert one.loss.value.shape == one.gap.low.shape == (0,)
    # Evaluated at steps 20, 40, ... 200. The training loss is the mean of the preceding 20 steps.
    plain = [float(np.mean(2.5 + 4.0 * np.exp(-np.arange(end - 19, end + 1) / 80.0))) for end in (20, 200)]
    sentence = describe_unmatched(result)
    assert f"late was evaluated at training losses of {9 - 0.0105:.4f} to {9 - 0.1905:.4f}, " in sentence
    assert f", attention at {plain[0]:.4f} to {plain[1]:.4f}; " in sentence
    assert sentence.endswith("; train late longer, or evaluate attention earlier")
    assert describe_unmatched(comparison_of(tmp_path / "matched", Synthetic(), Synthetic(**DELTA))) == ""


def test_one_evaluation_is_one_level(tmp_path):
    result = comparison_of(tmp_path, Synthetic(steps=20))
    assert result.levels == (0,)
    assert result.training_losses.shape == (1,)


@pytest.mark.parametrize("documents", [50, 400])
def test_standard_error_is_that_of_a_mean_for_independent_documents(tmp_path, documents):
    """Compare the bootstrap's standard error of a ratio with the textbook (delta method) one."""
    run = Synthetic(documents={"web": 5, "code": documents})
    delta = Synthetic(**DELTA, documents=run.documents, wobble=0.1)
    result = comparison_of(tmp_path, run, delta)
    corpus = [read_run(tmp_path / name).split("test")[0] for name in ("0", "1")]
    tokens = corpus[0].tokens

    def textbook(nats):
        residuals = nats - nats.sum() / tokens.sum() * tokens
        return np.sqrt((residuals**2).sum()) / tokens.sum()

    loss, gap = result.select("test")[0].loss, result.select("test")[1].gap
    at = result.headline
    assert loss.document_error[at] == pytest.approx(textbook(corpus[0].losses[-1]), rel=0.08)
    assert gap.document_error[at] == pytest.approx(textbook(corpus[1].losses[-1] - corpus[0].losses[-1]), rel=0.08)
    assert gap.high[at] - gap.low[at] == pytest.approx(2 * 1.96 * gap.error[at], rel=0.1)


def test_as_many_documents_as_are_needed_tell_a_gap_from_none(tmp_path):
    """300 documents predict how many are needed. A run with that many documents confirms it."""

    def measured(name, documents):
        runs = [Synthetic(wobble=w, documents={"web": 5, "code": documents}, **d) for w, d in ((0, {}), (0.3, DELTA))]
        result = comparison_of(tmp_path / name, *runs)
        return result.select("test")[1], result.headline

    few, at = measured("few", 300)
    needed = few.documents_needed(at, difference=0.02)
    assert 500 < needed < 5000
    assert few.documents_needed(at) == pytest.approx(25 * few.documents_needed(at, difference=0.02), rel=0.05)
    many, at = measured("many", needed)
    assert (many.gap.high[at] - many.gap.low[at]) / 2 == pytest.approx(0.02, rel=0.15)


def test_documents_that_do_not_differ_do_not_say_how_many_are_needed(tmp_path):
    """A single document allows no estimate. Its error of zero must not count as a precise result."""
    few = [Synthetic(documents={"web": 5, "code": 1}), Synthetic(documents={"web": 5, "code": 1}, **DELTA, gap=0.1)]
    result = comparison_of(tmp_path, *few)
    code = result.select("test", "code")[1]
    assert (code.documents, code.documents_needed(result.headline)) == (1, None)
    (row,) = precision_table(result, RESOLUTION).rows
    assert [cell.text for cell in row[-2:]] == ["1", "\u2013"]
    table = list(csv.DictReader(io.StringIO(render_table(result))))
    assert {line["documents_needed"] for line in table if line["domain"] == "code"} == {""}


def test_pairing_removes_what_is_hard_for_all(tmp_path):
    """Documents differ by 0.5 nats, but the runs differ by only 0.02 on a document, so pairing reduces the error."""
    result = comparison_of(tmp_path, Synthetic(), Synthetic(**DELTA, wobble=0.02))
    baseline, delta = result.select("test")
    unpaired = np.hypot(baseline.loss.error, delta.loss.error)[result.headline]
    assert delta.gap.error[result.headline] < unpaired / 10


def test_interval_holds_the_true_gap_as_often_as_it_says(tmp_path):
    """Both batches and documents are noisy. Intervals that ignore the batches' noise cover the truth far too rarely."""
    held = held_by_documents = 0
    repeats = 60
    for repeat in range(repeats):
        common = {"noise": 0.1, "wobble": 0.03, "corpus_seed": repeat, "seed": repeat, "steps": 100}
        runs = Synthetic(**common), Synthetic(**common | DELTA, gap=0.05, speed=0.85)
        result = comparison_of(tmp_path / f"{repeat}", *runs)
        gap, at = result.select("test")[1].gap, result.headline
        held += gap.low[at] <= 0.05 <= gap.high[at]
        held_by_documents += abs(gap.value[at] - 0.05) <= 1.96 * gap.document_error[at]
    assert held >= 0.85 * repeats
    assert held_by_documents < 0.6 * repeats


def test_batches_shared_by_runs_of_one_seed_cancel(tmp_path):
    """Runs with equal seed and speed see the same batch noise at the same steps, so it cancels."""
    common = {"noise": 0.1, "steps": 100}
    same = comparison_of(tmp_path / "a", Synthetic(**common), Synthetic(**common | DELTA))
    other = comparison_of(tmp_path / "b", Synthetic(**common), Synthetic(**common | DELTA, seed=2))
    assert same.select("test")[1].gap.error.max() < 1e-9
    assert other.select("test")[1].gap.error[other.headline] > 0.01


def test_curve_slope():
    x = np.linspace(3.0, 6.0, 8)
    np.testing.assert_allclose(curve_slope(x, x**2 - x, np.array([3.0, 4.5])), [5.0, 8.0], atol=1e-9)
    np.testing.assert_array_equal(curve_slope(x[:1], x[:1], x[:1]), [0.0])


def test_seeds_are_averaged_and_their_spread_reported(tmp_path):
    seeds = [Synthetic(**DELTA, seed=seed, gap=gap) for seed, gap in ((1, 0.01), (2, 0.03), (3, 0.08))]
    result = comparison_of(tmp_path, Synthetic(), *seeds)
    baseline, delta = result.select("test")
    np.testing.assert_allclose(delta.gap.value, 0.04, atol=1e-9)
    np.testing.assert_allclose(delta.seed_spread, np.std([0.01, 0.03, 0.08], ddof=1), atol=1e-9)
    assert np.isnan(baseline.seed_spread).all()
    assert len(result.architectures[1].runs) == 3


def test_the_same_again_gives_the_same_numbers(tmp_path):
    runs = Synthetic(noise=0.05), Synthetic(**DELTA, noise=0.05, wobble=0.1)
    one, other = (comparison_of(tmp_path / name, *runs) for name in "ab")
    for a, b in zip(one.measured, other.measured, strict=True):
        np.testing.assert_array_equal(a.gap.low, b.gap.low)


@pytest.mark.parametrize(
    ("documents", "batch_noise"),
    cases(
        every=[((5,), 0.0), ((20,), 0.05), ((50,), 0.0), ((5, 30, 8), 0.02), ((1, 1, 40), 0.0)],
        default=[((5,), 0.0), ((5, 30, 8), 0.02), ((1, 1, 40), 0.0)],
    ),
    ids=str,
)
def test_intervals_of_gaps_hold_the_truth_as_often_as_they_say(documents, batch_noise):
    """A hundred pairs of runs on documents of different lengths. Percentile intervals covered only 0.77 with five."""
    held = coverage_of_documents.gap_coverage(documents, batch_noise, 100)
    assert 0.89 <= held["all"] <= 1.0
    assert documents[0] < 3 or 0.89 <= held["first"] <= 1.0


def test_two_documents_have_no_interval(tmp_path):
    few = [Synthetic(documents={"web": 5, "code": 2}), Synthetic(documents={"web": 5, "code": 2}, **DELTA, gap=0.1)]
    result = comparison_of(tmp_path, *few)
    code = result.select("test", "code")[1]
    assert np.isnan(code.gap.low).all()
    np.testing.assert_allclose(code.gap.value, 0.1, atol=1e-9)
    assert [one["verdict"] for one in verdicts(result)] == ["unknown"]
    assert verdicts(result)[0]["interval"] == ""
    row = [line for line in csv.DictReader(io.StringIO(render_table(result))) if line["domain"] == "code"][-1]
    assert (row["gap_low"], row["gap_high"], row["gap_standard_error"]) == ("", "", "")
