"""Progress line on standard error, and messages above it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from megatron_ext.run_folder.layout import EVALUATION, METRICS, SUITES
from megatron_ext.training.loggers.core.base import Logger, Start
from megatron_ext.training.loggers.core.registry import register


@register("progress")
class ProgressLine(Logger):
    """Show the step, the loss and the throughput. Evaluations are printed above the line."""

    _bar: tqdm | None = None

    def start(self, start: Start) -> None:
        """Show the line, or set it back to the start's step."""
        if self._bar is not None:
            self._bar.n = start.step
            self._bar.refresh()
            return
        interval = 0.5 if sys.stderr.isatty() else 20.0  # fewer lines in a log file
        self._bar = tqdm(
            total=self.run.steps,
            initial=start.step,
            desc=self.run.name,
            unit="step",
            dynamic_ncols=True,
            mininterval=interval,
            delay=interval,  # otherwise the first line shows zeros
            file=sys.stderr,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Advance by a step and show its loss and throughput, if there are any."""
        if self._bar is None:
            return
        if "train/loss" in metrics:
            shown = f"loss {metrics['train/loss']:.4f}, {metrics['train/tokens_per_second']:,.0f} tokens/s"
            self._bar.set_postfix_str(shown, refresh=False)
        self._bar.update()

    def record(self, name: str, record: Mapping[str, Any]) -> None:
        """Advance by the record of a step. Records of evaluations are shown by `print_evaluations`."""
        if name == METRICS:
            super().record(name, record)

    def print_evaluations(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Print the results of one evaluation.

        Args:
            name: file of the records, EVALUATION or SUITES.
            records: results of each domain, or of each suite.
        """
        if name == EVALUATION and records:
            losses = ", ".join(f"{record['domain']} ({record['split']}) {record['loss']:.4f}" for record in records)
            self.print_line(f"step {records[0]['step']}: {losses}")
        for record in records if name == SUITES else ():
            self.print_line(
                f"step {record['step']}: {record['suite']}: {len(record['scores'])} scores, see evaluation/"
            )

    def print_line(self, line: str) -> None:
        """Print a line above the progress line, unless it is empty."""
        if line and self._bar is not None:
            self._bar.write(line, file=sys.stderr)

    def close(self) -> None:
        """End the line."""
        if self._bar is not None:
            self._bar.close()
