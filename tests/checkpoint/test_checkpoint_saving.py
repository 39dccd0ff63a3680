"""Background saves: they hold the state at the save, and a checkpoint counts only once it is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import saves
import torch
from pool import WorkerFailed

from megatron_ext.checkpoint.folder import Progress

pytestmark = pytest.mark.slow

LEFT = ["latest", "step_1"]


def same(a: saves.State, b: saves.State) -> bool:
    assert a.keys() == b.keys()
    assert all(a[kind].keys() == b[kind].keys() for kind in a)
    return all(torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind])


def contents(root: Path, step: int) -> dict[str, bytes]:
    """Files of the state, without the index, in which the order of the ranks' plans may differ."""
    return {path.name: path.read_bytes() for path in (root / f"step_{step}").glob("*.distcp")}


@pytest.mark.parametrize("sharding", ["megatron", "zero1", "zero2", "zero3"])
def test_the_state_at_the_save_is_saved_whatever_training_does(pool: Any, tmp_path: Path, sharding: str) -> None:
    root, at_once = tmp_path / "later", tmp_path / "at_once"
    at_save, later, told = pool.run(saves.train_on, 2, root, sharding)[0]
    assert not same(at_save, later)
    found, progress = pool.run(saves.read, 2, root, 4)[0]
    assert same(found, at_save)
    assert progress == Progress(4, 32, 1024)  # progress at the save, not after the next step
    # Ranks plan together twice, then reuse the plan. No part of a checkpoint is visible before it is complete.
    assert [busy for _, busy, _ in told] == [True] * 4
    assert [there for *_, there in told] == [False] * 4
    assert told[0][0] > told[1][0] > 0
    assert [planning for planning, *_ in told[2:]] == [0, 0]
    # Bit-identical to a synchronous save.
    pool.run(saves.save_at_once, 2, at_once, 4, sharding)
    assert contents(root, 4) == contents(at_once, 4)
    assert len(contents(root, 4)) == 4


def test_a_checkpoint_is_whole_when_all_ranks_are_done(pool: Any, tmp_path: Path) -> None:
    told = pool.run(saves.poll, 2, tmp_path)
    # Two polls while rank 1 writes, one that reports all files to the first rank, one that informs all ranks.
    assert [[(newest, there) for newest, there, _ in rank][:2] for rank in told] == [[(0, []), (0, [])]] * 2
    assert [[known for *_, known in rank] for rank in told] == [[False, False, False, True]] * 2
    assert [rank[3] for rank in told] == [(1, [1], True)] * 2


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(pool: Any, tmp_path: Path) -> None:
    for said, left, steps in pool.run(saves.fail, 2, tmp_path, saves.FULL):
        assert said == [
            f"UserError: {tmp_path}/step_2: cannot be saved: No space left on device; "
            "free disk space and start again with --resume (from step 1)"
        ]
        assert left == LEFT
        assert steps == [1, 3]  # training can continue all the same


def test_an_error_of_ours_on_one_rank_is_raised_on_all_with_its_traceback(pool: Any, tmp_path: Path) -> None:
    for (said,), left, steps in pool.run(saves.fail, 2, tmp_path, ValueError("a bug")):
        assert said.startswith("RuntimeError: the checkpoint of step 2 could not be saved\nTraceback")
        assert said.endswith("ValueError: a bug\n")
        assert (left, steps) == (LEFT, [1, 3])


def test_files_are_read_again_before_they_count(pool: Any, tmp_path: Path) -> None:
    for said in pool.run(saves.disk_that_forgets, 2, tmp_path):
        assert f"UserError: {tmp_path}/step_1: cannot be saved: __1_0.distcp does not contain what was written" in said
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_save_that_is_given_up(pool: Any, tmp_path: Path) -> None:
    assert pool.run(saves.abandon, 2, tmp_path) == [(LEFT, 1)] * 2


def test_whoever_waits_does_not_wait_for_the_head_start_of_training(pool: Any, tmp_path: Path) -> None:
    told = pool.run(saves.take_its_time, 2, tmp_path, timeout=60.0)
    assert told == [([0, 1, 2], ["latest", "step_1", "step_2"])] * 2


def test_a_rank_that_is_killed_while_saving_leaves_the_checkpoint_before(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 died"):
        pool.run(saves.be_killed, 2, tmp_path, timeout=30.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_2.partial", *LEFT]
    _, progress = pool.run(saves.read, 1, tmp_path, 1)[0]
    assert progress == Progress(1, 8, 256)
