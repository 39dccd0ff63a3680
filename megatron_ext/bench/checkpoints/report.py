"""Report of `selectron bench checkpoints` as JSON and as a Markdown table."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from megatron_ext.bench.checkpoints.run import Measured
from megatron_ext.bench.run_report import RunReport
from megatron_ext.utils.markdown import format_number, table


@dataclass(frozen=True, kw_only=True)
class CheckpointReport(RunReport):
    """Report on the checkpoints of one run.

    Attributes:
        measured: measurements.
    """

    stem = "checkpoints"

    measured: Measured

    def numbers(self) -> dict[str, Any]:
        """Return seconds, bytes and derived numbers."""
        return {"measured": asdict(self.measured), "derived": derived(self.measured)}

    def about(self) -> str:
        """Describe size and number of the checkpoints."""
        measured = self.measured
        return f", {measured.size / 1e6:,.0f} MB per checkpoint. Medians of {len(measured.saves)} saves."

    def table(self) -> list[str]:
        """Return a table with a row per number."""
        values = derived(self.measured)
        percent = {name: f"{100 * value:.1f} %" for name, value in values.items() if name.endswith("of_a_step")}
        rows = [
            ("training step without a save", f"{format_number(1e3 * self.measured.step)} ms"),
            ("stall of a save", f"{format_number(values['stall_ms'])} ms, {percent['stall_of_a_step']} of a step"),
            ("longest stall of a save", f"{percent['worst_stall_of_a_step']} of a step"),
            ("stall of the first save, including planning", f"{percent['first_stall_of_a_step']} of a step"),
            ("slowdown of the steps during a save, in total", f"{percent['slowed_by_of_a_step']} of a step"),
            ("time until the checkpoint is complete", f"{format_number(values['whole_after_s'])} s"),
            ("stall of a synchronous save", f"{percent['at_once_of_a_step']} of a step"),
            ("write, with checksums and verification", f"{format_number(values['save_gb_per_s'])} GB/s"),
            ("write of plain files of the same sizes", f"{format_number(values['floor_write_gb_per_s'])} GB/s"),
            ("check before loading", f"{format_number(values['check_gb_per_s'])} GB/s"),
            ("load", f"{format_number(values['load_gb_per_s'])} GB/s"),
            ("read of plain files", f"{format_number(values['floor_read_gb_per_s'])} GB/s"),
        ]
        return table(("quantity", "measured"), rows)


def derived(measured: Measured) -> dict[str, float]:
    """Return fractions of a training step, and throughput in GB/s (1e9 bytes)."""
    stalls = [save.stall for save in measured.saves]
    slowdowns = [sum(save.steps) - len(save.steps) * measured.step for save in measured.saves]
    gigabytes = measured.size / 1e9
    return {
        "stall_ms": 1e3 * median(stalls),
        "stall_of_a_step": median(stalls) / measured.step,
        "worst_stall_of_a_step": max(stalls) / measured.step,
        "first_stall_of_a_step": measured.first.stall / measured.step,
        "slowed_by_of_a_step": median(slowdowns) / measured.step,
        "at_once_of_a_step": measured.at_once / measured.step,
        "whole_after_s": median(save.whole_after for save in measured.saves),
        "save_gb_per_s": gigabytes / measured.at_once,
        "floor_write_gb_per_s": gigabytes / measured.floor_write,
        "check_gb_per_s": gigabytes / measured.check,
        "load_gb_per_s": gigabytes / measured.load,
        "floor_read_gb_per_s": gigabytes / measured.floor_read,
    }


def host() -> dict[str, str | None]:
    """Describe the host: processor and operating system."""
    return {"processor": f"{platform.machine()} x {os.cpu_count()}", "system": platform.release()}
