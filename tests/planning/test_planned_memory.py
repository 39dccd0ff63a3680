"""Persistent memory of a GPU, compared with hand counts, and plans that do not fit."""

from __future__ import annotations

import pytest

from megatron_ext.config.schema import DataConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_ext.planning.gpus import GIB, GPUS
from megatron_ext.planning.memory import GRADIENTS, STATE, USABLE_FRACTION, WEIGHTS, MemoryByPurpose, persistent_bytes

N = 1000


def kinds(replicas: int, precision: str = "bf16", **optimizer: str) -> tuple[float, float, float]:
    config = RunConfig(
        data=DataConfig(path=""),
        training=TrainingConfig(precision=precision),
        optimizer=OptimizerConfig(**optimizer),
    )
    found = persistent_bytes(config, N, replicas)
    return found[WEIGHTS], found[GRADIENTS], found[STATE]


@pytest.mark.parametrize(
    ("sharding", "expected"),
    [
        ("none", (2 * N, 4 * N, 12 * N)),
        ("megatron", (2 * N, 4 * N, 3 * N)),
        ("zero1", (2 * N, 4 * N, 3 * N)),
        ("zero2", (2 * N, N, 3 * N)),
        ("zero3", (N / 2, N, 3 * N)),
    ],
)
def test_sharding_over_four_replicas(sharding: str, expected: tuple[float, float, float]) -> None:
    assert kinds(4, sharding=sharding) == expected


def test_fp32_needs_no_second_copy() -> None:
    assert kinds(1, precision="fp32", sharding="none") == (4 * N, 4 * N, 8 * N)


def test_offloaded_state_needs_no_gpu_memory() -> None:
    assert kinds(2, sharding="zero2", offload="cpu")[2] == 0
    assert kinds(2, sharding="zero3", offload="cpu", offload_parameters="cpu")[0] == 0


def test_excess_message_names_largest_kind() -> None:
    gpu = GPUS["h100"]
    limit = USABLE_FRACTION * gpu.memory
    fits = MemoryByPurpose(rank=3, stage=1, kinds={"weights": limit / 4, "mixer": 3 * limit / 4}, by_layer={})
    large = MemoryByPurpose(rank=3, stage=1, kinds={"weights": limit / 4, "mixer": limit}, by_layer={})
    assert fits.fits(gpu)
    assert not large.fits(gpu)
    usable = f"{limit / GIB:.1f}"
    expected = f"tensors of rank 3 take 88.0 of {usable} usable GiB, mostly mixer ({usable})"
    assert large.describe_excess(gpu) == expected
