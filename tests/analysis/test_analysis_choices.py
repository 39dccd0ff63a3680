"""Choice of learning rates by validation loss: what is kept, the losses, warnings and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from analysis_synthetic import Synthetic, write_run

from megatron_ext.analysis.architecture import group_runs
from megatron_ext.analysis.choice_output import choice_figures, choice_table
from megatron_ext.analysis.choices import Choices, choose_runs, chosen_fields
from megatron_ext.analysis.report import write_report
from megatron_ext.analysis.run_files import DomainEvaluations
from megatron_ext.analysis.runs import Run
from megatron_ext.utils.errors import UserError

RATE, DECAY = "optimizer.lr", "optimizer.weight_decay"
TOKENS = np.array([10, 30])


def make_run(pattern: str, rate: float, loss: float, *, seed: int = 1, steps: int = 4, decay: float = 0.1) -> Run:
    """Return a run whose loss on all 40 validation tokens is `loss` at the end, and lower before."""
    name = f"{pattern}-{rate:g}-{decay:g}-{seed}"
    config = {"model": {"pattern": pattern}, "training": {"seed": seed, "steps": 4}, "run": {"name": name}}
    config["optimizer"] = {"lr": rate, "weight_decay": decay}
    last = np.array([loss - 0.3, loss + 0.1]) * TOKENS  # 10 * -0.3 + 30 * 0.1 = 0
    domains = (
        DomainEvaluations("test", "code", np.arange(2), TOKENS, np.stack([last, 9 * TOKENS - last])),
        DomainEvaluations("validation", "web", np.arange(2), TOKENS, np.stack([last / 2, last])),
    )
    step = np.arange(1, steps + 1)
    nothing = np.zeros(steps)
    evaluated = np.array([2, steps])
    return Run(Path("runs") / name, name, config, seed, step, 100 * step, nothing, nothing, evaluated, domains)


LOSSES = {
    ("attention*2", 1e-4): [2.5, 2.7],
    ("attention*2", 3e-4): [2.4, 2.6],
    ("attention*2", 1e-3): [2.3, 2.8],
    ("mamba2*2", 1e-4): [2.9, 2.8],
    ("mamba2*2", 3e-4): [2.7, 2.6],
    ("mamba2*2", 1e-3): [2.5, 2.6],
}


@pytest.fixture
def runs() -> list[Run]:
    return list(_all_runs())


def _all_runs() -> Iterator[Run]:
    for (pattern, rate), losses in LOSSES.items():
        yield from (make_run(pattern, rate, loss, seed=seed) for seed, loss in enumerate(losses, 1))


def summary(choices: Choices) -> dict[str, dict[float, float]]:
    return {one.label: {trial.settings[RATE]: trial.loss for trial in one.trials} for one in choices.choices}


def test_the_rate_with_the_lowest_mean_over_seeds_is_kept(runs: list[Run]) -> None:
    choices = choose_runs(runs[::-1], [RATE])
    # The lowest loss of a single seed of attention is at 1e-3, the lowest mean at 3e-4.
    assert [run.name for run in choices.runs] == [
        "mamba2*2-0.001-0.1-2",
        "mamba2*2-0.001-0.1-1",
        "attention*2-0.0003-0.1-2",
        "attention*2-0.0003-0.1-1",
    ]
    for pattern, losses in summary(choices).items():
        expected = {rate: sum(LOSSES[f"{pattern}*2", rate]) / 2 for rate in (1e-4, 3e-4, 1e-3)}
        assert list(losses) == list(expected)  # ascending
        assert losses == pytest.approx(expected)
    assert {one.label: one.best.settings for one in choices.choices} == {
        "attention": {RATE: 3e-4},
        "mamba2": {RATE: 1e-3},
    }
    assert choices.warnings == [
        "mamba2: the best optimizer.lr, 0.001, is the highest of 3 values tried; one beyond it may be better"
    ]


def test_only_seeds_of_every_value_are_averaged(runs: list[Run]) -> None:
    """The second seed of attention at 1e-4 and 1e-3 is missing, so the seed 2.6 at 3e-4 counts nowhere."""
    fewer = [run for run in runs if run.seed == 1 or run.config["optimizer"]["lr"] == 3e-4]
    choices = choose_runs(fewer, [RATE])
    assert summary(choices)["attention"] == pytest.approx({1e-4: 2.5, 3e-4: 2.4, 1e-3: 2.3})
    kept = [run for run in choices.runs if run.pattern == "attention*2"]
    assert [run.name for run in kept] == ["attention*2-0.001-0.1-1"]


def test_two_fields_are_chosen_together() -> None:
    losses = {
        (1e-4, 0.0): 2.5,
        (1e-4, 0.1): 2.4,
        (3e-4, 0.0): 2.2,
        (3e-4, 0.1): 2.3,
        (1e-3, 0.0): 2.6,
        (1e-3, 0.1): 2.7,
    }
    runs = [make_run("attention*2", rate, loss, decay=decay) for (rate, decay), loss in losses.items()]
    choices = choose_runs(runs, [RATE, DECAY])
    (choice,) = choices.choices
    assert choice.best.settings == {RATE: 3e-4, DECAY: 0.0}
    assert [tuple(trial.settings.values()) for trial in choice.trials] == sorted(losses)
    assert choices.warnings == []  # no value below a weight decay of 0 is possible
    # Chosen alone, the rate is chosen for each weight decay.
    alone = choose_runs(runs, [RATE])
    assert {one.label: one.best.settings[RATE] for one in alone.choices} == {
        "attention (weight_decay 0.0)": 3e-4,
        "attention (weight_decay 0.1)": 3e-4,
    }


def test_fields_that_vary_together_count_once() -> None:
    runs = [make_run("attention*2", rate, loss, decay=10 * rate) for rate, loss in ((1e-4, 2.5), (3e-4, 2.4))]
    choices = choose_runs(runs, [RATE, DECAY])
    (choice,) = choices.choices
    assert choice.best.settings == {RATE: 3e-4, DECAY: pytest.approx(3e-3)}
    assert choice.edges == {RATE: "highest"}
    assert choice_table(choices).columns[1] == RATE
    assert len(choice_figures(choices, group_runs(choices.runs))) == 1


def test_architecture_with_one_rate_is_kept_with_a_warning(runs: list[Run]) -> None:
    other = make_run("gla*2", 3e-4, 2.0)
    choices = choose_runs([*runs, replace(other, domains=())], [RATE])
    assert choices.runs[-1].name == other.name
    assert "gla" not in summary(choices)
    assert (
        choices.warnings[-1] == "gla was trained with a single value of optimizer.lr, other architectures with several"
    )
    assert choose_runs([other], [RATE]) == Choices([other], [], [])
    assert choose_runs(runs, []).runs == runs


def test_run_stopped_by_a_faulty_step_is_not_chosen(tmp_path: Path) -> None:
    stopped = replace(make_run("attention*2", 1e-3, 2.0, steps=3), path=tmp_path)
    line = {"time": "2026-01-01T00:00:00", "step": 4, "decision": "stop", "line": "the loss is not finite"}
    (tmp_path / "decisions.jsonl").write_text(json.dumps(line) + "\n")
    runs = [make_run("attention*2", 1e-4, 2.6), make_run("attention*2", 3e-4, 2.4), stopped]
    choices = choose_runs(runs, [RATE])
    assert summary(choices) == {"attention": pytest.approx({1e-4: 2.6, 3e-4: 2.4, 1e-3: float("inf")})}
    assert [run.name for run in choices.runs] == ["attention*2-0.0003-0.1-1"]
    assert choices.warnings == []  # a higher rate was tried
    with pytest.raises(UserError) as caught:
        choose_runs([stopped, replace(stopped, config=stopped.config | {"optimizer": {"lr": 1.0}})], [RATE])
    assert "was stopped by a faulty step, as was every run with another value of optimizer.lr" in str(caught.value)


@pytest.mark.parametrize(
    ("worst", "line"),
    [
        (
            make_run("attention*2", 1e-3, 2.0, steps=3),
            "runs/attention*2-0.001-0.1-1: ends after 300 tokens and runs/attention*2-0.0001-0.1-1 after 400, but "
            "optimizer.lr is chosen by the loss of equally long runs; finish it with --resume, or remove it from",
        ),
        (
            replace(make_run("attention*2", 1e-3, 2.0), evaluation_steps=np.array([1, 2])),
            "runs/attention*2-0.001-0.1-1: has no validation loss after its last step, by which optimizer.lr is chosen",
        ),
        (
            make_run("attention*2", 1e-3, 2.0, seed=2),
            "runs/attention*2-0.0001-0.1-1: no seed was trained with every value of optimizer.lr that the same",
        ),
    ],
    ids=["length", "evaluation", "seed"],
)
def test_runs_that_cannot_be_compared(worst: Run, line: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_runs([make_run("attention*2", 1e-4, 2.6), worst], [RATE])
    assert str(caught.value).startswith(line)


def test_fields_come_from_the_sweeps_of_the_runs(runs: list[Run], tmp_path: Path) -> None:
    of_sweep, by_hand = (replace(runs[0], path=tmp_path / folder / "run") for folder in ("sweep", "hand"))
    beside = replace(runs[0], path=tmp_path / "sweep" / "other")
    assert chosen_fields([of_sweep, by_hand]) == []
    (tmp_path / "sweep").mkdir()
    record = tmp_path / "sweep" / "sweep.json"
    record.write_text('{"runs": ["run"]}')  # as earlier versions wrote it
    assert chosen_fields([of_sweep]) == []
    record.write_text(json.dumps({"runs": ["run"], "chosen": [RATE, DECAY]}))
    assert chosen_fields([by_hand, of_sweep]) == [RATE, DECAY]
    assert chosen_fields([by_hand, beside]) == []
    record.write_text('{"runs": 3}')
    with pytest.raises(UserError) as caught:
        chosen_fields([of_sweep])
    assert str(caught.value).startswith(f"{record}: runs: input should be a valid array; repeat `selectron sweep`")


def test_table_and_figure(tmp_path: Path) -> None:
    stopped = replace(make_run("attention*2", 1e-2, 2.0, steps=3, decay=0.2), path=tmp_path)
    line = {"time": "2026-01-01T00:00:00", "step": 4, "decision": "stop", "line": "the loss is not finite"}
    (tmp_path / "decisions.jsonl").write_text(json.dumps(line) + "\n")
    losses = {(1e-4, 0.1): 2.5, (3e-4, 0.1): 2.25, (3e-4, 0.2): 2.375}
    runs = [make_run("attention*2", rate, loss, decay=decay) for (rate, decay), loss in losses.items()]
    choices = choose_runs([*runs, stopped], [RATE, DECAY])
    table = choice_table(choices)
    assert table.columns[:4] == ["architecture", RATE, DECAY, "seeds"]
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["attention", "0.0001", "0.1", "1", "2.5000", "0.2500", "\u2013"],
        ["attention", "0.0003", "0.1", "1", "2.2500", "0.0000", "chosen"],
        ["attention", "0.0003", "0.2", "1", "2.3750", "0.1250", "\u2013"],
        ["attention", "0.01", "0.2", "1", "\u2013", "\u2013", "stopped by a faulty step"],
    ]
    rates, decays = choice_figures(choices, group_runs(choices.runs))
    numbers = [picture.tables[f"{picture.name}.csv"].splitlines() for picture in (rates, decays)]
    assert numbers[0] == ["architecture,optimizer.lr,validation_loss", "attention,0.0001,2.5", "attention,0.0003,2.25"]
    assert numbers[1][1:] == ["attention,0.1,2.25", "attention,0.2,2.375"]
    assert rates.files()["choice_optimizer_lr.png"].startswith(b"\x89PNG")


@pytest.mark.usefixtures("unpainted")
def test_the_report_compares_the_chosen_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Attention has the lower validation loss with one rate, Mamba with the other."""
    final = {("attention", 1e-4): 2.9, ("attention", 1e-3): 2.5, ("mamba", 1e-4): 2.4, ("mamba", 1e-3): 2.6}
    for (mixer, rate), loss in final.items():
        run = Synthetic(
            name=f"{mixer}-{rate:g}",
            pattern=f"{mixer}*4",
            config={"optimizer": {"lr": rate}},
            training_loss=lambda step, loss=loss: loss + 4.0 * np.exp(-np.asarray(step) / 60.0),
        )
        write_run(tmp_path / "sweep" / run.name, run)
    record = {"runs": sorted(path.name for path in (tmp_path / "sweep").iterdir()), "chosen": [RATE]}
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps(record))
    page = write_report([tmp_path / "sweep"], tmp_path / "report").read_text(encoding="utf-8")
    assert '<h2 id="choices">' in page
    assert "attention: the best optimizer.lr, 0.001, is the highest of 2 values tried" in page
    assert "attention: the best optimizer.lr" in capsys.readouterr().err
    rows = (tmp_path / "report" / "matched_loss.csv").read_text()
    assert {row.split(",")[0] for row in rows.splitlines()[1:]} == {"attention", "mamba"}
    assert "also differs in lr 0.0001" in " ".join(page.split())
    assert (tmp_path / "report" / "choice_optimizer_lr.csv").exists()
