"""Ops on meta tensors save the tensors of their GPU implementations. Afterwards, kernels are launched again."""

from __future__ import annotations

import pytest
import torch
from meta_tensors import meta, saved_sizes

from kernels.meta.unlaunched import unlaunched
from kernels.softmax_attention import softmax_attention
from kernels.top1_chunk import top1_chunk_attention


@pytest.mark.parametrize("window", [None, 16])
def test_attention_saves_no_scores(window: int | None) -> None:
    q, k, v = (meta(1, 4096, 2, 64) for _ in range(3))
    with unlaunched():
        sizes = saved_sizes(lambda: softmax_attention(q, k, v, window=window))
    assert max(sizes) <= 4096 * 2 * 64 * 2
    assert sizes.count(4096 * 2 * 64 * 2) >= 3


def test_top1_chunk_saves_the_inputs_of_its_kernels() -> None:
    q, k, v = (meta(1, 4096, 2, 64) for _ in range(3))
    with unlaunched():
        sizes = saved_sizes(lambda: top1_chunk_attention(q, k, v, chunk_size=128))
    inputs_and_output, per_row = 4096 * 2 * 64 * 2, 4096 * 2 * 4
    assert sizes == [per_row] * 2 + [inputs_and_output] * 4


def test_kernels_are_launched_again_afterwards() -> None:
    from kernels.linear_cross_entropy import triton_rows

    logits = torch.zeros(2, 4)
    label = torch.tensor([0, 3])
    with unlaunched():
        shapes = triton_rows.statistics(meta(2, 4), torch.empty(2, dtype=torch.int64, device="meta"), 0, 4)
    assert shapes.is_meta
    if not torch.cuda.is_available():  # runs in Triton's interpreter
        highest, total, own = triton_rows.statistics(logits, label, 0, 4)
        assert highest.tolist() == [0, 0]
        assert total.tolist() == [4, 4]
        assert own.tolist() == [0, 0]
