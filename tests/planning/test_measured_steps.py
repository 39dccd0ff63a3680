"""Planned memory and time of whole steps, compared with GPU measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dry_runs
import pytest
from covering import EXHAUSTIVE, cover
from dry_runs import as_measured

from megatron_ext.model.step_parts import FEED_FORWARD, MIXER, NORMS, OPTIMIZER
from megatron_ext.planning.gpus import GPUS
from megatron_ext.planning.memory import peak_memory
from megatron_ext.planning.step_time import step_time

TRAINING = Path(__file__).parents[2] / "docs" / "benchmarks" / "training"
Dry = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A report of `selectron bench train`.

    Attributes:
        file: its name.
        memory: relative tolerance of planned memory.
        time: relative tolerance of planned step time. None: not compared, because the code has become faster since.
        gave_rates: whether rates of the step's parts were taken from this report. The plan must then reproduce them.
        gpu: the GPU that it was measured on.
    """

    file: str
    memory: float
    time: float | None = 0.06
    gave_rates: bool = False
    gpu: str = "h200"


REPORTS = [
    Measured(file="100k_e5273c8", memory=0.015, time=0.05, gave_rates=True),
    Measured(file="2k_e5273c8", memory=0.005, time=0.05, gave_rates=True),
    Measured(file="2k_08a0f50", memory=0.005, time=0.05, gave_rates=True),
    # Contains mixers in 8 bits. Only the feed-forward's 8-bit rate was taken from a measurement.
    Measured(file="2k_ed2e6a3", memory=0.015, time=0.04),
    Measured(file="8k_beb3a07", memory=0.005, time=0.02),
    Measured(file="32k_beb3a07", memory=0.005, time=0.02),
    Measured(file="100k_ed2e6a3", memory=0.025, time=0.03),
    Measured(file="8k_66b7b20", memory=0.03, time=0.06),
    Measured(file="32k_66b7b20", memory=0.03, time=0.06),
    Measured(file="100k_66b7b20", memory=0.03, time=0.06),
    Measured(file="2k_two_gpus_4f0b591", memory=0.015, time=0.03),
    Measured(file="8k_two_gpus_4f0b591", memory=0.005, time=0.03),
    Measured(file="32k_two_gpus_4f0b591", memory=0.005, time=0.03),
    Measured(file="100k_two_gpus_4f0b591", memory=0.03),
    Measured(file="100k_two_gpus_ed2e6a3", memory=0.05),
    Measured(file="100k_four_gpus_ea7afd2", memory=0.015),
    Measured(file="100k_four_gpus_2_ea7afd2", memory=0.015),
    Measured(file="100k_approx_d52b783", memory=0.015, time=0.03),
    Measured(file="100k_exact_d52b783", memory=0.015, time=0.03),
    Measured(file="100k_rwkv7_block_d52b783", memory=0.03, time=0.03),
    Measured(file="100k_gdn_d52b783", memory=0.025, time=0.03),
    Measured(file="2k_four_gpus_d52b783", memory=0.005, time=0.03),
    Measured(file="1m_four_gpus_d52b783", memory=0.05, time=0.04),
    Measured(file="dp4_6768b71", memory=0.015, time=0.07),
    Measured(file="dp4_2_6768b71", memory=0.015),
    Measured(file="100k_four_gpus_6768b71", memory=0.005, time=None),  # late ranks: see training.md
    Measured(file="two_gpus_6768b71", memory=0.01, time=0.02),
    Measured(file="2k_5dfa910", memory=0.01, time=0.03),
    Measured(file="8k_5dfa910", memory=0.01, time=0.03),
    Measured(file="32k_5dfa910", memory=0.01, time=0.05),
    Measured(file="100k_fp8_5dfa910", memory=0.03, time=0.03),
    Measured(file="8k_two_gpus_5dfa910", memory=0.01, time=0.03),
    Measured(file="32k_two_gpus_5dfa910", memory=0.01),
    Measured(file="100k_rounds_5dfa910", memory=0.005, time=0.08),
    Measured(file="gdn_two_gpus_8b94096", memory=0.015, time=0.05),
    Measured(file="hybrid_two_gpus_8b94096", memory=0.01, time=0.03),
    Measured(file="rwkv7_block_two_gpus_8b94096", memory=0.005, time=0.02),
    Measured(file="32k_rwkv7_block_two_gpus_8b94096", memory=0.005, time=0.02),
    Measured(file="100k_layouts_four_gpus_8b94096", memory=0.01, time=0.07),
    Measured(file="100k_cp4_queues_d5b382c", memory=0.005),
    Measured(file="100k_one_sample_db9a971", memory=0.005, time=0.065),
    Measured(file="100k_one_sample_queues_db9a971", memory=0.005, time=0.05),
    Measured(file="100k_cp4_63d9b55", memory=0.005),
    Measured(file="100k_one_sample_63d9b55", memory=0.005, time=0.085),
    Measured(file="100k_cp4_f9681a1", memory=0.005),
    Measured(file="100k_cp4_6b7e96c", memory=0.005),
    Measured(file="100k_cp4_more_6b7e96c", memory=0.005, time=0.08),
    Measured(file="50k_cp2_f9681a1", memory=0.005),
    Measured(file="50k_cp2_6b7e96c", memory=0.005),
    Measured(file="100k_four_gpus_6550355", memory=0.005),
    Measured(file="100k_two_gpus_6550355", memory=0.005),
    Measured(file="100k_two_h100_beb3a07", memory=0.015, gpu="h100"),
    Measured(file="100k_two_h100_1c4c8c8", memory=0.015, gpu="h100"),
    Measured(file="100k_08a0f50", memory=0.03, time=None),  # before attention used cuDNN
    Measured(file="100k_158fe53", memory=0.08, time=None),  # before SwiGLU was one kernel, which saves memory
]
TIME_APART = {
    ("2k_08a0f50", "attention"),  # before attention used cuDNN
    ("100k_cp4_more_6b7e96c", "approx_rounds4"),  # late ranks: see training.md
    ("100k_two_gpus_4f0b591", "hybrid_copies"),  # ranks that pass recurrent states used to scan their shard twice
}
"""Rows for which only the planned memory is compared, not the time."""


def _planned_from(row: dict[str, Any]) -> str:
    """Fields of a row that `as_measured` reads, except `training`, as a sort key."""
    configuration = row["configuration"]
    parallel = {field: value for field, value in configuration["parallel"].items() if value is not None}
    overrides = [one for one in row["overrides"] if not one.startswith("parallel.")]
    return json.dumps(
        [row["processes"], sorted(overrides), configuration["data"]["seq_length"], parallel], sort_keys=True
    )


Case = tuple[Measured, dict[str, Any]]


_INTERACTING = [("model", "exchange"), ("model", "recompute"), ("model", "fp8"), ("exchange", "layout")]
"""Pairs of properties of which every pair of values is compared, because their effects do not simply add up."""


def _pairs(case: Case) -> set[frozenset[Any]]:
    """Properties of a row that change memory or time, and pairs of those that act together."""
    report, row = case
    had, given = row["configuration"], dict(one.split("=", 1) for one in row["overrides"] if "=" in one)
    parallel = had["parallel"]
    overlays = [one for one in row["overrides"] if "=" not in one]
    values = {
        "model": (*overlays, *(given[name] for name in given if name.startswith(("model.", "mixers.")))),
        "layout": (parallel["tensor"], parallel["context"], row["processes"], given.get("optimizer.sharding")),
        "exchange": tuple(value for name, value in parallel.items() if name.startswith("context_")),
        "length": had["data"]["seq_length"],
        "micro_batch_size": had["training"]["micro_batch_size"],
        "recompute": had["training"]["recompute"],
        "fp8": given.get("training.fp8"),
        "gpu": report.gpu,
    }
    pairs: set[frozenset[Any]] = {frozenset({item}) for item in values.items()}
    pairs |= {frozenset({(a, values[a]), (b, values[b])}) for a, b in _INTERACTING}
    return pairs | ({frozenset({("rates of", report.file)})} if report.gave_rates else set())


def _rows() -> list[Any]:
    """Rows of all reports, or as many as hold every value and pair. `make test-exhaustive` compares all of them."""
    rows: list[Case] = [
        (report, row)
        for report in REPORTS
        for row in json.loads((TRAINING / f"{report.file}.json").read_text())["rows"]
        if "measured" in row and not row.get("plain_megatron")
    ]
    if not EXHAUSTIVE:
        rows = cover(rows, _pairs)
    rows.sort(key=lambda case: _planned_from(case[1]))  # equal configurations in one worker, which plans them once
    return [pytest.param(report, row, id=f"{report.file}-{row['variant']}") for report, row in rows]


@pytest.mark.parametrize(("report", "row"), _rows())
def test_step_memory_and_time_equal_measurements(dry: Dry, report: Measured, row: dict[str, Any]) -> None:
    config, processes, measured = as_measured(row), row["processes"], row["measured"]
    found = dry(dry_runs.footprint, config, processes)
    memory = peak_memory(config, found)
    assert memory.total == pytest.approx(measured["memory"]["allocated"], rel=report.memory)
    assert sum(memory.kinds.values()) == memory.total
    if report.time is None or (report.file, row["variant"]) in TIME_APART or "derived" not in row:
        return  # a row without "derived" ran out of time
    time = step_time(config, [found], GPUS[report.gpu], processes, per_node=8)
    assert time.seconds == pytest.approx(row["derived"]["s_per_step"], rel=report.time)
    if report.gave_rates:
        parts = measured["breakdown"]["parts"]
        for part in (MIXER, FEED_FORWARD, NORMS, OPTIMIZER):
            assert time.parts[part] == pytest.approx(parts[part], rel=0.1), part
