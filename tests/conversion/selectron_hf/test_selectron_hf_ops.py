"""Blockwise ops over queries, with small blocks, compared with ops that materialize all scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.native_sparse_attention import native_sparse_attention
from kernels.softmax_attention import alibi_slopes, softmax_attention
from kernels.top1_chunk import top1_chunk_attention
from kernels.top1_element import top1_element_attention
from megatron_ext.conversion.huggingface.selectron_hf import attention_ops_selectron as ops

HEADS, GROUPS, KEYS, WIDTH = 6, 2, 45, 8


@pytest.fixture(params=[0, 17, 44], ids=["all", "rest", "last"])
def inputs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Queries from an offset on, keys and values, with three queries per block."""
    monkeypatch.setattr(ops, "MAX_SCORES", 3 * 2 * HEADS * KEYS)
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, KEYS, heads, WIDTH, generator=generator) for heads in (HEADS, GROUPS, GROUPS))
    return {"q": q[:, request.param :], "k": k, "v": v, "query_offset": request.param}


def _check(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("slopes", [None, alibi_slopes(HEADS)], ids=["plain", "alibi"])
def test_softmax_attention(inputs: dict[str, Any], window: int | None, slopes: Tensor | None) -> None:
    expected = softmax_attention(**inputs, window=window, alibi_slopes=slopes, scale=0.7, implementation="reference")
    offset = inputs.pop("query_offset")
    _check(ops.softmax_attention(*inputs.values(), scale=0.7, window=window, slopes_h=slopes), expected)
    if window is not None:  # keys that no query sees may be missing
        first = max(offset - window + 1, 0)
        inputs = inputs | {name: inputs[name][:, first:] for name in "kv"}
        _check(ops.softmax_attention(*inputs.values(), scale=0.7, window=window, slopes_h=slopes), expected)


def test_alibi_slopes() -> None:
    for heads in range(1, 20):
        assert torch.equal(ops.alibi_slopes(heads, torch.device("cpu")), alibi_slopes(heads))


def test_top1_element(inputs: dict[str, Any]) -> None:
    expected, _ = top1_element_attention(**inputs, implementation="reference")
    del inputs["query_offset"]
    assert torch.equal(ops.top1_element(*inputs.values(), scale=0.7, estimator="selected"), expected)


@pytest.mark.parametrize("score", ["approx", "exact", "exact_lse"])
@pytest.mark.parametrize(("size", "top_k", "local"), [(4, 1, True), (8, 3, False), (16, 16, True), (64, 1, False)])
def test_top1_chunk(inputs: dict[str, Any], score: Any, size: int, top_k: int, local: bool) -> None:
    rule: dict[str, Any] = {"chunk_size": size, "top_k": top_k, "score": score, "local": local, "scale": 0.7}
    expected, _ = top1_chunk_attention(**inputs, **rule, implementation="reference")
    del inputs["query_offset"]
    _check(ops.top1_chunk(*inputs.values(), **rule), expected)


def test_the_first_of_equal_chunks_is_selected() -> None:
    q, k = torch.ones(1, 16, 1, 2), torch.ones(1, 16, 1, 2)
    v = torch.arange(16.0).view(1, 16, 1, 1).expand(-1, -1, -1, 2)
    rule: dict[str, Any] = {"chunk_size": 4, "top_k": 1, "score": "exact", "local": False, "scale": 1.0}
    assert ops.top1_chunk(q, k, v, **rule)[0, 4:, 0, 0].tolist() == pytest.approx([1.5] * 12)
    assert ops.top1_element(q, k, v, scale=1.0, estimator="selected").abs().max() == 0


@pytest.mark.parametrize(("size", "selected", "window"), [(4, 4, 5), (8, 1, 100), (64, 2, 1)])
def test_native_sparse_attention(inputs: dict[str, Any], size: int, selected: int, window: int) -> None:
    rule: dict[str, Any] = {"block_size": size, "num_selected": selected, "window": window, "scale": 0.7}
    gates = torch.rand(2, inputs["q"].shape[1], HEADS, 3, generator=torch.Generator().manual_seed(6))
    expected = native_sparse_attention(**inputs, gates=gates, **rule, implementation="reference")
    del inputs["query_offset"]
    _check(ops.native_sparse_attention(*inputs.values(), gates, **rule), expected)
