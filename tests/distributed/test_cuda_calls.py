"""No code of megatron-core or Selectron bypasses the CPU adapter and calls CUDA in a real run on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_calls
import parity
import pytest
import torch
from pool import WorkerPool

RUNS = {
    "tensor, sequence, pipeline": (4, {"tensor": 2, "pipeline": 2, "sequence": True}, "hybrid", {}),
    "context, interleaved": (4, {"context": 2, "pipeline": 2, "virtual_pipeline": 2}, "hybrid", {}),
    "tied, bf16, unsharded": (2, {"pipeline": 2}, "tied", {"precision": "bf16", "sharding": "none"}),
    "data, bf16": (2, {}, "hybrid", {"precision": "bf16"}),
}
PATTERN = "top1_chunk,gated_deltanet,attention,top1_element"


@pytest.mark.parametrize(
    "name", [n if n == "tensor, sequence, pipeline" else pytest.param(n, marks=pytest.mark.slow) for n in RUNS]
)
def test_no_cuda_call_slips_past_the_adapter(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    world_size, parallel, kind, fields = RUNS[name]
    model = {"tie_embeddings": kind == "tied"}
    mixers: dict[str, dict[str, Any]] = {"attention": {"position_encoding": "learned"}}
    config = parity.run_config(PATTERN, mixers, model, parallel, recompute="full", **fields)
    for calls, missed, reached in pool.run(cuda_calls.run_watched, world_size, config, tmp_path):
        assert calls == []
        assert missed == []
        assert reached > 50


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("torch.cuda.current_device()", "current_device"),
        ("torch.cuda.synchronize()", "synchronize"),
        ("torch.cuda.Stream()", "Stream"),
        ("torch.cuda.get_rng_state()", "get_rng_state"),
        ("torch.empty(1, device='cuda')", "_lazy_init"),
        ("torch.ones(1).to('cuda')", "_lazy_init"),
        ("torch.ones(1).cuda()", "cuda"),
        ("torch.nn.Linear(1, 1).cuda()", "cuda"),
    ],
)
def test_the_watch_sees_what_the_adapter_would_miss(statement: str, what: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("about the CPU")
    code = compile(f"def slip():\n    {statement}\n", "somewhere.py", "exec")
    namespace: dict[str, Any] = {"torch": torch}
    exec(code, namespace)
    with cuda_calls.watched() as calls, pytest.raises(AssertionError, match="CUDA was asked for"):
        namespace["slip"]()
    assert len(calls) == 1
    assert what in calls[0].partition(",")[0]
    assert calls[0].endswith("called at somewhere.py:2 in slip")


def test_the_watch_ends() -> None:
    before = torch.cuda.synchronize, torch.Tensor.cuda
    with cuda_calls.watched():
        assert torch.cuda.synchronize is not before[0]
    assert (torch.cuda.synchronize, torch.Tensor.cuda) == before
