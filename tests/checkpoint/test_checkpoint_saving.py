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

REMAINING = ["latest", "step_1"]


def same(a: saves.State, b: saves.State) -> bool:
    assert a.keys() == b.keys()
    assert all(a[kind].keys() == b[kind].keys() for kind in a)
    return all(torch.equal(a[kind][name], b[kind][name]) for kind in a for name in a[kind])


def contents(root: Path, step: int) -> dict[str, bytes]:
    """Files of the state, without the index, in which the order of the ranks' plans may differ."""
    return {path.name: path.read_bytes() for path in (root / f"step_{step}").glob("*.distcp")}


@pytest.mark.parametrize("sharding", ["megatron", "zero1", "zero2", "zero3"])
def test_training_does_not_change_a_save_in_progress(pool: Any, tmp_path: Path, sharding: str) -> None:
    root, synchronous = tmp_path / "asynchronous", tmp_path / "synchronous"
    at_save, next_state, observed = pool.run(saves.train_during_save, 2, root, synchronous, sharding)[0]
    assert not same(at_save, next_state)
    found, progress = pool.run(saves.load, 2, root, 4)[0]
    assert same(found, at_save)
    assert progress == Progress(4, 32, 1024)  # progress at the save, not after the next step
    # Ranks plan together twice, then reuse the plan. No part of a checkpoint is visible before it is complete.
    assert [busy for _, busy, _ in observed] == [True] * 4
    assert [is_visible for *_, is_visible in observed] == [False] * 4
    assert observed[0][0] > observed[1][0] > 0
    assert [planning for planning, *_ in observed[2:]] == [0, 0]
    # Bit-identical to a synchronous save.
    assert contents(root, 4) == contents(synchronous, 4)
    assert len(contents(root, 4)) == 4


def test_a_checkpoint_is_complete_when_all_ranks_are_done(pool: Any, tmp_path: Path) -> None:
    observed = pool.run(saves.poll, 2, tmp_path)
    # Two polls while rank 1 writes, one that reports all files to the first rank, one that informs all ranks.
    assert [[(newest, steps) for newest, steps, _ in rank][:2] for rank in observed] == [[(0, []), (0, [])]] * 2
    assert [[is_done for *_, is_done in rank] for rank in observed] == [[False, False, False, True]] * 2
    assert [rank[3] for rank in observed] == [(1, [1], True)] * 2


def test_a_full_disk_of_one_rank_is_an_error_on_all(pool: Any, tmp_path: Path) -> None:
    for messages, files, steps in pool.run(saves.fail, 2, tmp_path, saves.DISK_FULL):
        assert messages == [
            f"UserError: {tmp_path}/step_2: cannot be saved: No space left on device; "
            "free disk space and start again with --resume (from step 1)"
        ]
        assert files == REMAINING
        assert steps == [1, 3]  # training can continue


def test_a_bug_on_one_rank_is_raised_on_all_with_its_traceback(pool: Any, tmp_path: Path) -> None:
    for (message,), files, steps in pool.run(saves.fail, 2, tmp_path, ValueError("a bug")):
        assert message.startswith("RuntimeError: the checkpoint of step 2 could not be saved\nTraceback")
        assert message.endswith("ValueError: a bug\n")
        assert (files, steps) == (REMAINING, [1, 3])


def test_written_files_are_verified(pool: Any, tmp_path: Path) -> None:
    for message in pool.run(saves.save_to_corrupting_disk, 2, tmp_path):
        assert (
            f"UserError: {tmp_path}/step_1: cannot be saved: __1_0.distcp does not contain what was written" in message
        )
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_save_leaves_no_files(pool: Any, tmp_path: Path) -> None:
    assert pool.run(saves.abandon, 2, tmp_path) == [(REMAINING, 1)] * 2


def test_waiting_skips_the_delay(pool: Any, tmp_path: Path) -> None:
    observed = pool.run(saves.save_with_long_delay, 2, tmp_path)
    assert observed == [([0, 1, 2], ["latest", "step_1", "step_2"])] * 2


def test_a_rank_killed_while_saving_leaves_the_earlier_checkpoint(pool: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="rank 1 died"):
        pool.run(saves.kill_while_saving, 2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_2.partial", *REMAINING]
    _, progress = pool.run(saves.load, 1, tmp_path, 1)[0]
    assert progress == Progress(1, 8, 256)
