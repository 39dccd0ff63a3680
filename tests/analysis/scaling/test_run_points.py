"""Runs as points of a scaling law, and `selectron fit` on them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from analysis_synthetic import TOKENS_A_STEP, Synthetic, write_run

from megatron_ext.analysis.scaling.law import ScalingLaw
from megatron_ext.analysis.scaling.run_points import by_mixer, read_run_points
from megatron_ext.cli import main
from megatron_ext.utils.errors import UserError

LAWS = {"attention": ScalingLaw(1.7, 4.0, 20.0, 0.34, 0.36), "mamba": ScalingLaw(1.8, 3.0, 25.0, 0.33, 0.35)}
SIZES = {2: 2_000, 4: 9_000, 8: 41_000}
"""Parameters by number of layers, without embeddings."""
VOCABULARY = 700


def sweep(folder: Path, steps: tuple[int, ...] = (20, 60)) -> Path:
    """Write runs of three sizes, two lengths and two mixers, with losses from their laws that ignore embeddings."""
    for mixer, law in LAWS.items():
        for layers, params in SIZES.items():
            for length in steps:
                loss = float(law.loss(params, length * TOKENS_A_STEP))
                size = {"parameters": params + 2 * VOCABULARY, "embedding_parameters": VOCABULARY}
                write_run(
                    folder / f"{mixer}_{layers}_{length}",
                    Synthetic(
                        name=f"{mixer}_{layers}_{length}",
                        pattern=f"{mixer}*{layers}",
                        steps=length,
                        gap=0.2 * (mixer == "mamba"),
                        hardness=0.0,
                        size=size | {"output_layer_parameters": VOCABULARY},
                        training_loss=lambda step, loss=loss, end=length: loss + 0.1 * (np.asarray(step) <= 0.95 * end),
                    ),
                )
    return folder


def test_a_point_is_a_runs_end(tmp_path: Path) -> None:
    folder = sweep(tmp_path / "sweep", steps=(60,))
    points = read_run_points([folder])
    assert [(point.run.name, point.mixer) for point in points] == [
        *((f"attention_{layers}_60", "attention") for layers in SIZES),
        *((f"mamba_{layers}_60", "mamba") for layers in SIZES),
    ]
    for point, params in zip(points, [*SIZES.values()] * 2, strict=True):
        assert (point.params, point.tokens) == (params + 2 * VOCABULARY, 60 * TOKENS_A_STEP)
        assert point.loss == pytest.approx(float(LAWS[point.mixer].loss(params, point.tokens)), rel=1e-12)
    assert [point.params for point in read_run_points([folder], embeddings=False)] == [*SIZES.values()] * 2


def test_a_test_loss_is_that_of_all_documents_after_the_last_step(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Synthetic(size={"parameters": 9, **EMBEDDINGS}, wobble=0.3))
    lines = [json.loads(line) for line in (folder / "evaluation.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["step"] == 200 and line["split"] == "test"]
    nats, tokens = (sum(sum(line[f"document_{of}"]) for line in last) for of in ("loss", "tokens"))
    (point,) = read_run_points([folder])
    assert point.test_loss == pytest.approx(nats / tokens, rel=1e-12)
    assert len(last) == 2
    expected = {f"{line['domain']} (out of domain)": sum(line["document_loss"]) / line["num_tokens"] for line in last}
    assert point.domain_losses == pytest.approx(expected, rel=1e-12)


EMBEDDINGS = {"embedding_parameters": 1, "output_layer_parameters": 1}


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_a_law_for_each_mixer_of_a_folder_of_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = sweep(tmp_path / "sweep"), tmp_path / "fit"
    arguments = ["fit", str(folder), "--output", str(output), "--json", "--without-embeddings"]
    assert main(arguments) == 0
    results = json.loads(capsys.readouterr().out)
    assert list(results["mixers"]) == list(LAWS)
    for mixer, law in LAWS.items():
        found = ScalingLaw(*(results["mixers"][mixer][name] for name in ("E", "A", "B", "alpha", "beta")))
        for params in SIZES.values():
            for tokens in (20 * TOKENS_A_STEP, 60 * TOKENS_A_STEP):
                assert float(found.loss(params, tokens)) == pytest.approx(float(law.loss(params, tokens)), rel=1e-4)
        assert results["mixers"][mixer]["points"] == 6
        assert results["mixers"][mixer]["test_loss"]["points"] == 6
    (difference,) = results["test_loss_differences"]
    assert difference["ratio"] > 1.03
    # Without easier and harder documents, all test domains have the same losses.
    expected = {name: pytest.approx(value) for name, value in difference.items() if not isinstance(value, str)}
    assert results["domain_loss_differences"] == [
        {**difference, **expected, "domain": domain, "adjusted_p_value": pytest.approx(2 * difference["p_value"])}
        for domain in ("code (out of domain)", "maths (out of domain)")
    ]
    assert "adjusted for the 2 comparisons (Holm); 2 of them are below 0.05" in (output / "fit.md").read_text()
    assert (output / "test_loss.png").is_file()
    with (output / "points.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 12
    assert {row["run"] for row in rows} == {str(path) for path in folder.iterdir()}
    # The written points can be fitted again, without being deleted.
    again = ["fit", str(output / "points.csv"), "--output", str(output), "--json"]
    assert main(again) == 0
    assert json.loads(capsys.readouterr().out) == results
    assert (output / "points.csv").is_file()


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_some_runs_without_a_test_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path / "sweep")
    (folder / "mamba_4_20" / "evaluation.jsonl").unlink()
    assert main(["fit", str(folder), "--output", str(tmp_path / "fit")]) == 0
    said = capsys.readouterr()
    few = "two token counts: E, B and beta cannot be determined"
    assert said.err.splitlines() == [
        f"warning: {folder}/mamba_4_20 has no test loss after its last step: test losses are not fitted",
        "fitting a law to 6 points of attention",
        "fitting a law to 6 points of mamba",
        f"warning: {folder} (attention): {few}",
        f"warning: {folder} (mamba): {few}",
    ]
    assert "Test loss" not in said.out
    assert "test_loss" not in (tmp_path / "fit" / "points.csv").read_text()


def test_runs_at_fault(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Synthetic())
    with pytest.raises(UserError, match=r"run/model\.json: is missing: the number of parameters is unknown; "):
        read_run_points([folder])
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:150]))
    with pytest.raises(UserError, match=r"run: stopped at step 150 of 200; finish it with --resume, or remove it"):
        read_run_points([folder])


def cut(run: Path, steps: int) -> None:
    """Truncate the records of a run, as if it was killed."""
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= steps))


@pytest.mark.usefixtures("few_starts", "unpainted")
def test_runs_of_a_folder_that_are_not_finished_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, output = sweep(tmp_path / "sweep", steps=(20, 60, 180)), tmp_path / "fit"
    cut(folder / "mamba_8_180", 150)
    (folder / "attention_2_20" / "metrics.jsonl").unlink()
    (folder / "attention_4_20" / "metrics.jsonl").write_text('{"step": 1, "lo')
    left_out = {
        "attention_2_20": "has no step yet",
        "attention_4_20": "has no step yet",
        "mamba_8_180": "stopped at step 150 of 180",
    }
    assert main(["fit", str(folder), "--output", str(output), "--json"]) == 0
    printed = capsys.readouterr()
    expected = [f"{folder}/{name}: {reason}" for name, reason in left_out.items()]
    assert printed.err.splitlines() == [
        *(f"warning: {line}: it is not used in the fit" for line in expected),
        *("fitting a law to 7 points of attention", "fitting a law to 8 points of mamba"),
    ]
    results = json.loads(printed.out)
    assert [mixer["points"] for mixer in results["mixers"].values()] == [7, 8]
    assert results["left_out"] == [{"run": f"{folder}/{name}", "reason": why} for name, why in left_out.items()]
    said = (output / "fit.md").read_text()
    assert said.endswith("Runs that are not used:\n\n" + "".join(f"- {line}\n" for line in expected))
    with (output / "points.csv").open() as file:
        assert {Path(row["run"]).name for row in csv.DictReader(file)} == {
            run.name for run in folder.iterdir() if run.name not in left_out
        }


def test_a_run_that_is_named_must_be_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path / "sweep")
    cut(folder / "mamba_8_60", 50)
    runs = [str(run) for run in sorted(folder.iterdir())]
    assert main(["fit", *runs, "--output", str(tmp_path / "fit")]) == 2
    problem = "stopped at step 50 of 60; finish it with --resume, or remove it"
    assert capsys.readouterr().err == f"selectron: error: {folder}/mamba_8_60: {problem}\n"
    assert not (tmp_path / "fit").exists()


def test_too_few_finished_runs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sweep(tmp_path / "sweep")
    for layers in SIZES:
        cut(folder / f"mamba_{layers}_60", 50)
    assert main(["fit", str(folder), "--output", str(tmp_path / "fit")]) == 2
    *warnings, error = capsys.readouterr().err.splitlines()
    assert len(warnings) == 3
    assert error.startswith(f"selectron: error: {folder} (mamba): 3 points with distinct params or tokens, but the law")
    for run in folder.iterdir():
        cut(run, 0 if run.name.startswith("mamba") else 10)
    assert main(["fit", str(folder), "--output", str(tmp_path / "fit")]) == 2
    assert "selectron: error: " in capsys.readouterr().err
    for run in folder.iterdir():
        cut(run, 0)
    assert main(["fit", str(folder), "--output", str(tmp_path / "fit")]) == 2
    problem = "has no step yet, and none of the 11 others is finished; resume some of them with --resume"
    assert capsys.readouterr().err == f"selectron: error: {folder}/attention_2_20: {problem}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["a.csv", "run"],
            "a.csv: cannot be combined with other arguments; give a single CSV file, or only run folders",
        ),
        (["a.csv", "b.csv"], "a.csv: cannot be combined with other arguments; "),
        (["a.csv", "--without-embeddings"], "--without-embeddings: has no effect on a CSV file; give that number in"),
        (["absent.csv"], "absent.csv: cannot be read (No such file or directory); give a CSV file"),
        (["absent"], "absent/config.yaml: is missing; give the folder of a run: "),
    ],
)
def test_bad_arguments(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.csv").write_text("params,tokens,loss\n1,2,3\n")
    assert main(["fit", *arguments, "--output", "fit"]) == 2
    assert said in capsys.readouterr().err
    assert not Path("fit").exists()


def test_runs_with_the_best_values_of_a_sweep_are_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two sizes with another best weight decay each still have one law."""
    losses = {(2, 0.1): 3.0, (2, 0.3): 3.1, (4, 0.1): 2.8, (4, 0.3): 2.7}
    for (layers, decay), loss in losses.items():
        run = Synthetic(name=f"{layers}-{decay}", pattern=f"attention*{layers}", size={"parameters": 9, **EMBEDDINGS})
        run.config, run.training_loss = {"optimizer": {"weight_decay": decay}}, lambda step, loss=loss: loss + 0 * step
        write_run(tmp_path / run.name, run)
    record = {"runs": [f"{layers}-{decay}" for layers, decay in losses], "chosen": ["optimizer.weight_decay"]}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    points = read_run_points([tmp_path])
    assert [(point.run.name, point.mixer) for point in points] == [("2-0.1", "attention"), ("4-0.3", "attention")]
    reason = "another optimizer.weight_decay has a lower validation loss"
    assert list(map(str, points.excluded)) == [f"{tmp_path}/{name}: {reason}" for name in ("2-0.3", "4-0.1")]
    assert "the best optimizer.weight_decay, 0.3, is the highest of 2 values tried" in capsys.readouterr().err


def test_runs_of_other_recipes_are_no_points_of_one_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with another sequence length, optimizer, data mixture or text are not fitted together.

    Model size, steps, batch size, learning rate and seed may differ.
    """
    size = {"parameters": 9, **EMBEDDINGS}
    text = {"train": "a" * 64, "evaluation": "t", "texts": []}
    changes: dict[str, dict] = {
        "base": {},
        "wide": {"model": {"hidden_size": 128}, "optimizer": {"lr": 1e-4, "warmup_steps": 5}},
        "batch": {"training": {"global_batch_size": 64, "seed": 7}},
        "long": {"data": {"seq_length": 1024}},
        "decay": {"optimizer": {"weight_decay": 0.3}},
        "mixed": {"data": {"weights": {"web": 1.0}}},
        "other": {},
    }
    for name, config in changes.items():
        data = text if name != "other" else {**text, "train": "b" * 64}
        write_run(tmp_path / "runs" / name, Synthetic(name=name, config=config, size=size | {"data": data}))
    names = {point.run.name: point.mixer for point in read_run_points([tmp_path / "runs"])}
    assert names["base"] == names["wide"] == names["batch"]
    assert len({names[name] for name in ("base", "long", "decay", "mixed", "other")}) == 5
    assert "seq_length 1024" in names["long"]
    assert "weight_decay 0.3" in names["decay"]
    assert "text bbbbbbbb" in names["other"]
    said = capsys.readouterr().err
    assert "warning: other is trained on different text from base: its domains have a different order" in said
    assert "warning: the runs of attention have different settings, and each group gets a law of its own: " in said
    assert set(by_mixer(read_run_points([tmp_path / "runs"]))) == set(names.values())
