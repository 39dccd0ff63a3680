"""Optimizer state saved as boxes: a range of a flattened tensor is cut into a few boxes without loss."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.optim.state import boxes, set_steps

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_cover_slice_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numbers = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).view(shape)
    start = data.draw(st.integers(0, numbers.numel()))
    stop = data.draw(st.integers(start, numbers.numel()))
    found = []
    for offset, size in boxes(shape, start, stop):
        box = numbers[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        assert box.shape == size
        found += box.flatten().tolist()
    assert found == list(range(start, stop))


@given(SHAPES.filter(len), st.data())
def test_number_of_boxes_is_bounded(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = int(torch.tensor(shape).prod())
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    assert len(list(boxes(shape, start, stop))) <= 2 * len(shape) - 1


def test_step_count_per_parameter() -> None:
    """AdamW increments step counts in place, so a tensor shared by two parameters would count double."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    set_steps(optimizer, 7)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in parameters] == [8.0, 8.0]
