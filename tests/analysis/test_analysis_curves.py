"""Curves of loss over tokens: the drawn values equal the recorded ones."""

import csv
import json

import numpy as np
import pytest
from analysis_synthetic import TOKENS_A_STEP, Synthetic, write_run
from covering import cases

from megatron_ext.analysis.architecture import group_runs
from megatron_ext.analysis.curves import domain_curves, training_curves
from megatron_ext.analysis.runs import read_runs
from megatron_ext.analysis.style import DARK, LIGHT, MAX_LEGEND, short_count, styles


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    runs = [Synthetic(noise=0.02, steps=200), Synthetic(name="long", pattern="mamba*4", steps=1000, every=100, seed=2)]
    return [write_run(root / str(index), run) for index, run in enumerate(runs)]


def rows_of(picture):
    ((name, text),) = picture.tables.items()
    assert name == f"{picture.name}.csv"
    return list(csv.DictReader(text.splitlines()))


def test_a_training_curve_is_a_mean_over_the_last_steps(folders):
    rows = [row for row in rows_of(training_curves(group_runs(read_runs(folders)))) if row["run"] == "attention"]
    losses = {line["step"]: line["loss"] for line in map(json.loads, (folders[0] / "metrics.jsonl").open())}
    assert [int(row["step"]) for row in rows] == list(range(4, 201))  # without the first 2 %
    for row in rows:
        step = int(row["step"])
        window = [losses[s] for s in range(step - max(1, step // 10) + 1, step + 1)]  # a tenth of those so far
        assert float(row["training_loss"]) == pytest.approx(np.mean(window), rel=1e-6)
        assert int(row["tokens"]) == step * TOKENS_A_STEP


def test_a_long_curve_is_thinned_and_keeps_its_end(folders):
    rows = [row for row in rows_of(training_curves(group_runs(read_runs(folders)))) if row["run"] == "long"]
    steps = [int(row["step"]) for row in rows]
    assert len(steps) == 400
    assert (steps[0], steps[-1]) == (20, 1000)
    assert steps == sorted(set(steps))


def test_domain_curves_are_the_recorded_losses(folders):
    rows = rows_of(domain_curves(group_runs(read_runs(folders))))
    found = {(row["run"], row["domain"], int(row["step"])): (float(row["loss"]), int(row["tokens"])) for row in rows}
    recorded = {}
    for folder, name in zip(folders, ("attention", "long"), strict=True):
        for line in map(json.loads, (folder / "evaluation.jsonl").open()):
            recorded[name, line["domain"], line["step"]] = (pytest.approx(line["loss"], rel=1e-6), line["tokens"])
    assert found == recorded


@pytest.mark.parametrize(
    ("theme", "stacked"),
    cases(every=[(LIGHT, False), (DARK, False), (LIGHT, True), (DARK, True)], default=[(LIGHT, False), (DARK, True)]),
)
def test_pictures_are_drawn(folders, theme, stacked):
    architectures = group_runs(read_runs(folders))
    for picture in (training_curves(architectures), domain_curves(architectures)):
        assert picture.draw(theme, stacked).startswith(b"\x89PNG")


def test_many_runs_have_the_colour_of_their_mixer(tmp_path):
    """Each run has a shade of its mixer's colour, the largest model the colour itself. The legend names only mixers."""
    folders = []
    for mixer in ("attention", "mamba"):
        for index in range(MAX_LEGEND):
            size = {"parameters": 1000 * (index + 1), "embedding_parameters": 0, "output_layer_parameters": 0}
            config = {"model": {"hidden_size": 8 * (index + 1)}}
            run = Synthetic(pattern=f"{mixer}*4", config=config, size=size)
            folders.append(write_run(tmp_path / f"{mixer}{index}", run))
    architectures = group_runs(read_runs(folders))
    found = styles(architectures, LIGHT)
    assert found.shares_legend
    assert list(found.legend) == ["attention", "mamba"]
    assert len({style.color for style in found.by_label.values()}) == 2 * MAX_LEGEND
    assert found.by_label[f"mamba (hidden_size {8 * MAX_LEGEND})"].color.lower() == found.legend["mamba"].color.lower()
    assert {style.marker for label, style in found.by_label.items() if label.startswith("mamba")} == {"s"}
    few = styles(architectures[:MAX_LEGEND], LIGHT)
    assert not few.shares_legend
    assert list(few.legend) == [one.label for one in architectures[:MAX_LEGEND]]


def test_a_long_run_is_averaged_over_a_hundred_steps(tmp_path):
    folder = write_run(tmp_path / "run", Synthetic(steps=2000, every=1000, noise=0.1))
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").open()]
    last = rows_of(training_curves(group_runs(read_runs([folder]))))[-1]
    assert float(last["training_loss"]) == pytest.approx(np.mean(losses[-100:]), rel=1e-6)


@pytest.mark.parametrize(
    ("value", "words"), [(950, "950"), (1000, "1k"), (999_600, "1M"), (1_234_567, "1.23M"), (2.5e9, "2.5B")]
)
def test_short_count(value, words):
    assert short_count(value) == words
