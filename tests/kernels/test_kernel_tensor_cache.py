"""Caches of tensors that the layers of a model share."""

import torch

from kernels.common import tensor_cache
from kernels.common.tensor_cache import cached_tensors, clear_tensor_caches


def test_results_are_shared_until_all_caches_are_emptied(monkeypatch):
    monkeypatch.setattr(tensor_cache, "_clear_functions", [])

    @cached_tensors(1)
    def ones(size):
        return torch.ones(size)

    @cached_tensors(4)
    def zeros(size):
        return torch.zeros(size)

    functions = (ones, zeros)
    first = [function(3) for function in functions]
    assert all(function(3) is tensor for function, tensor in zip(functions, first, strict=True))
    clear_tensor_caches()
    second = [function(3) for function in functions]
    assert all(torch.equal(a, b) and a is not b for a, b in zip(first, second, strict=True))
    ones(2)
    assert ones(3) is not second[0]  # it kept one result
