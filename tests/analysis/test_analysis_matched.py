"""Comparison at matched training loss: it recovers gaps of synthetic runs, with intervals of nominal coverage."""

import csv
import io
from dataclasses import replace

import coverage_of_documents
import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run
from covering import cases

from megatron_ext.analysis.findings import density_warning, describe_seeds, describe_unmatched, verdicts
from megatron_ext.analysis.matched import RESOLUTION, compare
from megatron_ext.analysis.matched_runs import default_window, training_loss
from megatron_ext.analysis.matched_tables import domain_table, level_table, precision_table, render_table
from megatron_ext.analysis.runs import read_run, read_runs

DELTA = {"pattern": "gated_deltanet*4"}


def comparison_of(tmp_path, *runs, **options):
    folders = [write_run(tmp_path / f"{index}", run) for index, run in enumerate(runs)]
    return compare(read_runs(folders), **options)


def test_recovers_a_constant_gap_at_every_level_and_domain(tmp_path):
    """Test loss is affine in training loss, so interpolation is exact at any training speed."""
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
    np.testing.assert_allclose(gap, 0.1 * (6.0 - result.matched_losses), atol=1e-3)


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
    levels = result.matched_losses[list(result.levels)]
    assert len(levels) == 6
    assert levels[0] == min(x.max() for x in xs)
    assert levels[-1] == result.matched_losses[result.headline] == max(x.min() for x in xs)
    assert (np.diff(result.matched_losses) < 0).all()


def test_training_loss_is_the_mean_of_the_window_before_the_evaluation(tmp_path):
    run = read_run(write_run(tmp_path / "run", Synthetic(noise=0.1)))
    assert default_window([run]) == 20
    expected = [run.losses[end - 7 : end].mean() for end in range(20, 201, 20)]
    np.testing.assert_allclose(training_loss(run, 7), expected, rtol=1e-12)


def test_window_is_the_shortest_stretch_between_evaluations_of_any_run(tmp_path):
    runs = [read_run(write_run(tmp_path / f"{every}", Synthetic(every=every))) for every in (50, 8)]
    assert default_window(runs) == 8
    assert default_window(runs[:1]) == 20


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
    (sentence,) = describe_unmatched(result)
    assert f"late was evaluated at training losses of {9 - 0.0105:.4f} to {9 - 0.1905:.4f}, " in sentence
    assert f", attention at {plain[0]:.4f} to {plain[1]:.4f}; " in sentence
    assert sentence.endswith("; train late longer, or evaluate attention earlier")
    assert describe_unmatched(comparison_of(tmp_path / "matched", Synthetic(), Synthetic(**DELTA))) == []


def test_one_evaluation_is_one_level(tmp_path):
    result = comparison_of(tmp_path, Synthetic(steps=20))
    assert result.levels == (0,)
    assert result.matched_losses.shape == (1,)


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


def test_a_slow_architecture_does_not_hide_the_others(tmp_path):
    """Each is compared at the lowest loss that it and attention reached, where its gap of known size is recovered."""

    class Growing(Synthetic):
        def test_loss(self, training_loss):
            return 1.3 * training_loss + 0.1 * (6.0 - training_loss)

    slow = Synthetic(pattern="top1_element*4", name="slow", speed=0.4)
    result = comparison_of(tmp_path, Synthetic(every=5), Growing(**DELTA, every=5, speed=1.2), slow)
    lowest = [training_loss(read_run(tmp_path / str(index)), result.window).min() for index in range(3)]
    heads = {label: result.matched_losses[at] for label, at in result.headlines.items()}
    assert heads == {"attention": lowest[0], "gated_deltanet": lowest[0], "top1_element": lowest[2]}
    _, delta, element = result.select("test")
    at = result.headlines["gated_deltanet"]
    np.testing.assert_allclose(delta.gap.value[at], 0.1 * (6.0 - lowest[0]), atol=1e-3)
    assert np.isnan(element.gap.value[at])
    last_row = level_table(result).rows[-1]
    assert [cell.text for cell in last_row[-1:]] == ["\u2013"]


def test_matched_validation_loss(tmp_path):
    """Validation loss equals the noise-free training loss here, so noise of the batches has no effect on the gap."""
    runs = Synthetic(noise=0.3, seed=3), Synthetic(**DELTA, noise=0.3, gap=0.05, speed=0.9)
    result = comparison_of(tmp_path, *runs, match="validation")
    gap, at = result.select("test")[1].gap, result.headline
    np.testing.assert_allclose(gap.value[at], 0.05, atol=1e-9)
    assert result.select("validation") == []
    x = [run.split("validation")[0] for run in read_runs([tmp_path / "0", tmp_path / "1"])]
    lowest = max((one.losses.sum(axis=1) / one.tokens.sum()).min() for one in x)
    assert result.matched_losses[at] == pytest.approx(lowest)


def test_error_of_sparse_evaluations_is_part_of_the_interval(tmp_path):
    """The noise of single checkpoints, 0.05 nats, is the main error. Its estimate comes from evaluations left out."""

    class Scattered(Synthetic):
        def test_loss(self, training_loss):
            return 1.3 * training_loss + 0.05 * np.random.default_rng(int(training_loss * 1e6)).standard_normal()

    runs = Scattered(every=10), Scattered(**DELTA, every=10, speed=0.9)
    result = comparison_of(tmp_path, *runs)
    delta, at = result.select("test")[1], result.headline
    assert 0.03 < delta.curve_error[at] < 0.15
    assert delta.gap.error[at] == pytest.approx(np.hypot(delta.curve_error[at], delta.gap.document_error[at]))
    assert delta.gap.low[at] < 0 < delta.gap.high[at]
    assert f"a standard error of {delta.curve_error[at]:.4f}, more than the 0.004" in density_warning(result)
    assert density_warning(comparison_of(tmp_path / "smooth", Synthetic(every=10), Synthetic(**DELTA, every=10))) == ""


def test_seeds_are_part_of_the_interval(tmp_path):
    """The standard error is that of paired differences between seeds; one seed borrows the spread of the others."""
    gaps = {1: 0.01, 2: 0.03, 3: 0.08}
    base = [Synthetic(seed=seed, name=f"a{seed}") for seed in gaps]
    others = [Synthetic(**DELTA, seed=seed, gap=gap, name=f"d{seed}") for seed, gap in gaps.items()]
    lone = Synthetic(pattern="mamba*4", gap=0.02, name="m")
    result = comparison_of(tmp_path, *base, *others, lone)
    _, delta, mamba = result.select("test")
    at = result.headline
    deviation = np.std(list(gaps.values()), ddof=1)
    assert delta.gap.error[at] == pytest.approx(deviation / np.sqrt(3), abs=1e-9)
    assert delta.gap.high[at] - delta.gap.value[at] == pytest.approx(4.3027 * deviation / np.sqrt(3), rel=1e-4)
    # Attention's seeds do not differ: four degrees of freedom, two of them without spread.
    assert mamba.gap.error[at] == pytest.approx(deviation / np.sqrt(2), abs=1e-9)
    assert result.seed_noise.degrees_of_freedom == 4
    assert "mamba has one seed" in describe_seeds(result)
    # Both terms of Mamba's gap use the variance of the same runs, whose degrees of freedom do not add up.
    pair = comparison_of(tmp_path / "pair", *base[:2], replace(lone, gap=0.0), *others[:2])
    mamba, at = pair.select("test")[1], pair.headline
    assert mamba.architecture == "mamba"
    assert mamba.gap.high[at] - mamba.gap.value[at] == pytest.approx(12.7062 * mamba.gap.error[at], rel=1e-4)
    assert describe_seeds(comparison_of(tmp_path / "one", Synthetic(), lone)).startswith("Every architecture has one")


def test_each_size_is_compared_with_attention_of_its_size(tmp_path):
    runs = [
        Synthetic(pattern=pattern, gap=gap, config={"model": {"hidden_size": width, "ffn_hidden_size": ffn}}, name=name)
        for name, pattern, width, ffn, gap in (
            ("a1", "attention*4", 64, 256, 0.0),
            ("a2", "attention*4", 128, 512, 0.5),
            ("m1", "mamba*4", 64, 240, 0.01),  # as many parameters as attention of its width
            ("m2", "mamba*4", 128, 480, 0.52),
        )
    ]
    result = comparison_of(tmp_path, *runs)
    entries = verdicts(result)
    assert [(entry["gap"], entry["also"]) for entry in entries] == [
        ("+0.0100", "ffn_hidden_size 240"),
        ("+0.0200", "ffn_hidden_size 480"),
    ]
    assert ["64" in entry["label"] and "64" in entry["baseline"] for entry in entries] == [True, False]


def test_intervals_of_a_family_are_wider(tmp_path):
    """Two independent gaps: the quantile of the larger of two normal values is 2.2365, that of one 1.96."""
    documents = {"web": 5, "code": 400}
    runs = [
        Synthetic(pattern=f"{name}*4", wobble=0.1, documents=documents) for name in ("attention", "mamba", "retnet")
    ]
    result = comparison_of(tmp_path, *runs)
    at = result.headline
    for measured in result.compared("test"):
        low, high = result.family[measured.architecture]
        single = measured.gap.high[at] - measured.gap.low[at]
        assert 1.05 < (high - low) / single < 2.2365 / 1.96 + 0.02
    assert comparison_of(tmp_path / "pair", *runs[:2]).family == {}


def test_attention_of_a_size_without_partners_beside_one_without_a_common_loss(tmp_path):
    """The page has a table by domain even if nothing is compared."""
    late = Synthetic(**DELTA, name="late", training_loss=lambda step: 9.0 - 0.001 * np.asarray(step))
    large = [replace(run, config={"model": {"hidden_size": 128}}) for run in (Synthetic(name="large"), late)]
    result = comparison_of(tmp_path, Synthetic(), *large)
    assert [row[2].text.partition(" ")[0] for row in domain_table(result).rows] == ["attention"] * 3


def test_the_last_interval_does_not_shorten_the_window(tmp_path):
    run = read_run(write_run(tmp_path / "run", Synthetic(every=50)))
    assert default_window([replace(run, evaluation_steps=np.array([50, 100, 150, 200, 202]))]) == 20
