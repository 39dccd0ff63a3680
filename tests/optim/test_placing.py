"""Flat pieces of parameters as boxes of whole tensors, against torch's own indexing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.optim.placing import boxes, placed


@st.composite
def a_piece(draw: Any) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    stop = draw(st.integers(0, math.prod(shape)))
    return shape, draw(st.integers(0, stop)), stop


@given(a_piece())
def test_boxes_are_the_elements_in_order(piece: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = piece
    numbered = torch.arange(math.prod(shape)).view(shape)
    found = [
        numbered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten()
        for offsets, sizes in boxes(shape, start, stop)
    ]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *found]).tolist() == list(range(start, stop))
    assert len(found) <= 2 * max(len(shape), 1) - 1


def fill(whole: torch.Tensor, shards: list[ShardedTensor]) -> None:
    for shard in shards:
        whole[shard.global_slice()] = shard.data


@pytest.mark.parametrize("cut", [0, 1, 4, 7, 12])
def test_pieces_of_two_ranks_make_up_the_whole_with_the_layers_before_it(cut: int) -> None:
    """A parameter [2, 6] of the second of three layers, the lower half of a tensor [4, 6]."""
    parameter = ShardedTensor.from_rank_offsets(
        "w", torch.zeros(2, 6), (0, 1, 3), (1, 1, 2), replica_id=(0, 0, 0), prepend_axis_num=1
    )
    moment, whole = torch.arange(1.0, 13.0), torch.zeros(3, 4, 6)
    for start, stop in ((0, cut), (cut, 12)):
        flat = {"optimizer.state.exp_avg": moment[start:stop]}
        for shards in placed(parameter, start, stop, flat, (0, 0, 0)).values():
            assert {shard.key for shard in shards} <= {"optimizer.state.exp_avg.w"}
            fill(whole, shards)
    assert torch.equal(whole[1, 2:], moment.view(2, 6))
    assert int((whole != 0).sum()) == 12


def two_halves(key: str, data: torch.Tensor, replica_id: Any, _: Any) -> dict[str, Any]:
    """As Megatron keeps a SwiGLU's gate and value: the first rank of two, in tensors of their own."""
    gate, value = data.chunk(2)
    return {
        name: ShardedTensor.from_rank_offsets(f"{key}.{name}", half, (0, 0, 2), replica_id=replica_id)
        for name, half in {"gate": gate, "value": value}.items()
    }


@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 11), (11, 24), (3, 5), (12, 12), (10, 14)])
def test_a_piece_over_both_halves_of_a_parameter(start: int, stop: int) -> None:
    factory = ShardedTensorFactory("w", torch.zeros(4, 6), two_halves, sum, (0, 0, 0))
    moment = torch.arange(24.0)
    found = placed(factory, start, stop, {"m": moment[start:stop]}, (0, 0, 0))["m"]
    wholes = {"m.w.gate": torch.full((4, 6), -1.0), "m.w.value": torch.full((4, 6), -1.0)}
    for shard in found:
        fill(wholes[shard.key], [shard])
    expected = torch.full((24,), -1.0)
    expected[start:stop] = moment[start:stop]
    assert torch.equal(torch.cat([wholes["m.w.gate"][:2], wholes["m.w.value"][:2]]).flatten(), expected)


def test_pieces_are_filled_where_they_are() -> None:
    parameter = ShardedTensor.from_rank_offsets("w", torch.zeros(3, 4), replica_id=(0, 0, 0))
    flat = torch.zeros(7)
    for shard in placed(parameter, 2, 9, {"m": flat}, (0, 0, 0))["m"]:
        shard.data.fill_(1.0)
    assert flat.tolist() == [1.0] * 7
