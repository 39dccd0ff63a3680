"""Runs of a sweep that wait for other runs of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.schema import DataConfig, RunConfig, RunSection, TrainingConfig
from megatron_ext.launch.branches import find_trunks, group_by_trunk
from megatron_ext.utils.errors import UserError


def run(branch_from: Path | str | None = None, **training: int) -> RunConfig:
    section = RunSection(branch_from=None if branch_from is None else str(branch_from))
    return RunConfig(data=DataConfig(path="x"), run=section, training=TrainingConfig(**training))


def test_runs_are_grouped_by_trunk(tmp_path: Path) -> None:
    configs = {
        "twig": run(tmp_path / "branch/checkpoints/step_40", steps=60),
        "branch": run(tmp_path / "trunk/checkpoints/step_20", steps=50, checkpoint_every=10, keep_every=40),
        "trunk": run(steps=100, checkpoint_every=10, keep_every=20),
        "other": run("elsewhere/trunk/checkpoints/step_7"),
        "second": run(tmp_path / "trunk/checkpoints/step_100", steps=150),
    }
    trunks = find_trunks(tmp_path, configs)
    assert trunks == {"twig": "branch", "branch": "trunk", "second": "trunk"}
    assert group_by_trunk(configs, trunks) == {
        None: ["trunk", "other"],
        "trunk": ["branch", "second"],
        "branch": ["twig"],
    }
    # A trunk that is not in the list is finished.
    assert group_by_trunk(["twig", "second"], trunks) == {None: ["twig", "second"]}


@pytest.mark.parametrize(
    ("trunk", "line"),
    [
        (
            {"steps": 100, "checkpoint_every": 30},
            "run short: run.branch_from: trunk writes no checkpoint at step 40, but every 30 steps and at its last "
            "step 100; choose one of these steps, or set its training.checkpoint_every",
        ),
        (
            {"steps": 100, "checkpoint_every": 0},
            "run short: run.branch_from: trunk writes no checkpoint at step 40, but only at its last step 100; "
            "choose one of these steps, or set its training.checkpoint_every",
        ),
        (
            {"steps": 100, "checkpoint_every": 20, "keep_checkpoints": 3},
            "run short: run.branch_from: trunk keeps only its newest 3 checkpoints, which may not include step 40; "
            "set training.keep_every=40 for trunk",
        ),
    ],
)
def test_checkpoint_that_the_trunk_will_not_keep_is_rejected(tmp_path: Path, trunk: dict[str, int], line: str) -> None:
    checkpoint = tmp_path / "trunk/checkpoints/step_40"
    with pytest.raises(UserError) as caught:
        find_trunks(tmp_path, {"trunk": run(**trunk), "short": run(checkpoint)})
    assert str(caught.value) == line
    checkpoint.mkdir(parents=True)  # a checkpoint kept earlier
    assert find_trunks(tmp_path, {"trunk": run(**trunk), "short": run(checkpoint)}) == {"short": "trunk"}


def test_cyclic_branches_are_rejected(tmp_path: Path) -> None:
    step = "checkpoints/step_1000"
    circle = r"run.branch_from: these runs wait for each other: (a, b|b, a); remove run.branch_from"
    with pytest.raises(UserError, match=circle):
        find_trunks(tmp_path, {"a": run(tmp_path / "b" / step), "b": run(tmp_path / "a" / step)})
