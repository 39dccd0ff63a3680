"""Training steps with isolated documents under several layouts, compared with each document alone in one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import parity
import pytest
from pool import WorkerPool

PATTERN = "attention,gated_deltanet,top1_chunk,mamba2"
BOUNDS = [0, 1, 7, 30, 32, 45, 64]
"""Bounds of the documents in two samples of 32 tokens. One document spans both tensor-parallel ranks."""


def _config(pattern: str, parallel: dict[str, Any], **fields: Any) -> Any:
    mixers = {"top1_chunk": {"chunk_size": 4}}
    config = parity.run_config(pattern, mixers, {}, parallel, **fields)
    training = replace(config.training, global_batch_size=2, micro_batch_size=2)
    return replace(config, training=training, data=replace(config.data, reset_attention=True))


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> tuple[float, float]:
    """Loss and gradient norm in one process, with each document passed alone."""
    return pool.run(parity.first_step_by_document, 1, _config(PATTERN, {}), BOUNDS)[0]


@pytest.mark.parametrize(
    ("world_size", "parallel", "recompute"),
    [
        (1, {}, "full"),
        (2, {"tensor": 2, "sequence": True}, "none"),
        (2, {"tensor": 2, "sequence": True}, "full"),
        (2, {"pipeline": 2}, "none"),
    ],
)
def test_a_step_is_that_of_each_document_alone(
    pool: WorkerPool, alone: tuple[float, float], world_size: int, parallel: dict[str, Any], recompute: str
) -> None:
    config = _config(PATTERN, parallel, recompute=recompute)
    loss, norm = pool.run(parity.packed_first_step, world_size, config, BOUNDS)[0]
    assert loss == pytest.approx(alone[0], abs=2e-6, rel=0)
    assert norm == pytest.approx(alone[1], rel=5e-6)
    one_document_a_sample = pool.run(parity.packed_first_step, world_size, config, [0, 32, 64])[0]
    assert norm != pytest.approx(one_document_a_sample[1], rel=1e-4)
