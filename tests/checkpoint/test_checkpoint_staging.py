"""Copies of the state: separate storage, exact values, and reused memory over saves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_ext.checkpoint.staging import Staging, _copy_on_device_grouped
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")


def tensors() -> list[Tensor]:
    """Tensors of several dtypes, some of them views of others."""
    whole = torch.arange(60.0)
    return [whole[10:30], torch.randn(7).bfloat16(), whole[40:50], torch.tensor([3]), torch.empty(0), whole[5::10]]


def test_copies_do_not_change_with_the_tensors() -> None:
    live, staging = tensors(), Staging(CPU)
    before = [t.clone() for t in live]
    fetch_to_host = staging.copy(live)
    for t in live:
        t.zero_()
    for copy, expected in zip(fetch_to_host(), before, strict=True):
        assert torch.equal(copy, expected)
        assert copy.dtype == expected.dtype
        assert copy.untyped_storage().nbytes() == copy.nbytes  # torch.save writes no more than the tensor


def test_memory_is_reused_for_tensors_of_the_same_sizes() -> None:
    live, staging = tensors(), Staging(CPU)
    addresses = [t.data_ptr() for t in staging.copy(live)()]
    assert [t.data_ptr() for t in staging.copy(live)()] == addresses
    others = [torch.ones(9), *live[1:]]
    assert torch.equal(staging.copy(others)()[0], torch.ones(9))


def test_copies_of_a_dtype_share_a_storage() -> None:
    live = tensors()
    found = _copy_on_device_grouped(live)
    assert all(torch.equal(copy, t) and copy.dtype == t.dtype for copy, t in zip(found, live, strict=True))
    storages = {t.dtype: t.untyped_storage().data_ptr() for t in found}
    assert all(t.untyped_storage().data_ptr() == storages[t.dtype] for t in found)
    for t in live:
        t.zero_()
    assert [float(copy.float().sum()) for copy in found[:1]] == [sum(range(10, 30))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("on_device", [True, False])
def test_gpu_tensors_may_change_while_their_copies_are_fetched(on_device: bool) -> None:
    platform = Platform(torch.device("cuda", 0), "nccl")
    live, staging = [t.cuda() for t in tensors()] + [torch.randn(20 << 20, device="cuda")], Staging(platform)
    staging._is_on_device = on_device
    before = [t.cpu() for t in live]
    for _ in range(2):
        fetch_to_host = staging.copy(live)
        changed = [t.clone() for t in live]
        for t in live:
            t.zero_()
        for copy, expected in zip(fetch_to_host(), before, strict=True):
            assert torch.equal(copy, expected)
            assert copy.is_pinned() or not copy.numel()
        for t, value in zip(live, changed, strict=True):
            t.copy_(value)
