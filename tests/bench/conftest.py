from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.bench.timing import Times
from megatron_ext.bench.layers.cases import SIZES, LayerShape, Size
from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig


class FakeMeter:
    """Fake meter that calls the timed function once."""

    def __init__(self, *_: object) -> None:
        self.timed = 0

    def time(self, run: Callable[[], object]) -> Times:
        run()
        self.timed += 1
        return Times(2.0, 1.5, 3.0)

    def new_bytes(self, run: Callable[[], object]) -> int:
        return 3 * 2**28


@pytest.fixture
def meter() -> FakeMeter:
    return FakeMeter()


TINY = Size(hidden=32, heads=2, head_dim=16)


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch) -> LayerShape:
    """A shape small enough for a CPU, whose size is registered as `tiny`."""
    monkeypatch.setitem(SIZES, "tiny", TINY)
    return LayerShape(size_name="tiny", size=TINY, length=70, batch=2)


@pytest.fixture
def small_run() -> RunConfig:
    """Configuration of a run with steps of milliseconds, whose data is never read."""
    return derive(
        RunConfig(
            data=DataConfig(path="none", seq_length=16),
            model=ModelConfig(pattern="attention", hidden_size=32, num_attention_heads=2, ffn_hidden_size=64),
            training=TrainingConfig(global_batch_size=2, micro_batch_size=1, precision="fp32"),
        )
    )
