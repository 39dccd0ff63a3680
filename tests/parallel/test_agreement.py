"""Values and errors that ranks share with all ranks. Nothing received is unpickled."""

from __future__ import annotations

import math
import pickle
from unittest.mock import patch

import pytest
import torch.distributed as dist
from pool import WorkerPool

from megatron_ext.checkpoint.folder import DamagedCheckpoint
from megatron_ext.data.failed import DamagedShard
from megatron_ext.parallel.agreement import (
    from_first_rank,
    gather_objects,
    gather_on_first,
    gather_values,
    raise_on_all_ranks,
)
from megatron_ext.utils.errors import UserError

ODD = {"numbers": [0.1, -0.0, math.inf, 2**70, None, True], "text": "é\ud800\n", "": []}


def _values(rank: int, world_size: int) -> None:
    assert gather_objects([rank, ODD]) == [[other, ODD] for other in range(world_size)]
    assert gather_objects("x" * (1000 * rank)) == ["x" * (1000 * other) for other in range(world_size)]
    assert math.isnan(gather_objects(math.nan)[0])
    assert from_first_rank(ODD if rank == 0 else 3) == ODD
    assert from_first_rank(None) is None
    parts = gather_on_first(bytes([rank] * rank))
    assert parts == ([bytes([other] * other) for other in range(world_size)] if rank == 0 else None)
    pairs = [dist.new_group(ranks) for ranks in ((0, 1), (2, 3))]
    assert gather_values(rank, pairs[rank // 2]) == [rank // 2 * 2, rank // 2 * 2 + 1]


def test_gathered_values(pool: WorkerPool) -> None:
    pool.run(_without_pickles, 4, _values)


def _without_pickles(rank: int, world_size: int, work: object) -> object:
    """Run `work` with pickle disabled, which detects torch's object collectives."""
    broken = patch.object(pickle, "Unpickler", side_effect=AssertionError("unpickled"))
    modules = patch.multiple("torch.distributed.distributed_c10d", _unpickler=None, _pickler=None)
    with broken, modules:
        return work(rank, world_size)  # type: ignore[operator]


def _errors(rank: int, world_size: int) -> list[tuple[str, str, str | None]]:
    said = []
    for error in (
        UserError("a", f"of {rank}", "b"),
        DamagedCheckpoint("a", f"of {rank}", "é"),
        DamagedShard("a", f"of {rank}", "b", "shard"),
    ):

        def check(error: UserError = error) -> None:
            if rank:
                raise error

        with pytest.raises(UserError) as raised:
            raise_on_all_ranks(check)
        said.append((type(raised.value).__name__, str(raised.value), getattr(raised.value, "shard", None)))
    raise_on_all_ranks(lambda: None)
    return said


def test_first_error_is_raised_on_all_ranks(pool: WorkerPool) -> None:
    expected = [
        ("UserError", "a: of 1; b", None),
        ("DamagedCheckpoint", "a: of 1; é", None),
        ("DamagedShard", "a: of 1; b", "shard"),
    ]
    assert pool.run(_without_pickles, 3, _errors) == [expected] * 3


def test_without_process_group() -> None:
    assert gather_objects((1, 2)) == [(1, 2)]
    error = DamagedCheckpoint("a", "b", "c")

    def check() -> None:
        raise error

    with pytest.raises(DamagedCheckpoint) as raised:
        raise_on_all_ranks(check)
    assert raised.value is error
