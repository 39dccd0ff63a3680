"""Benchmark of layers: for every shape and mixer, check and time ours, and time the peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from kernels.bench.bench_report import describe_machine
from kernels.bench.contestant import NotRun, one_line
from kernels.bench.timing import Meter
from megatron_ext.bench.layers import ours, peers
from megatron_ext.bench.layers.cases import OURS, LayerPlan, LayerShape
from megatron_ext.bench.layers.layer import Layer, hidden_states, training_pass
from megatron_ext.bench.layers.report import LayerReport, LayerRow, Measured
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform.device import Platform

ReportProgress = Callable[[str], None]


def bench(
    plan: LayerPlan,
    meter: Meter,
    platform: Platform,
    *,
    report_progress: ReportProgress = print,
    save: Callable[[LayerReport], None] | None = None,
) -> LayerReport:
    """Measure all rows.

    Args:
        plan: settings.
        meter: measures on the platform's device.
        platform: of the layers.
        report_progress: called with a line before and after each row, as autotuning of a kernel can take minutes.
        save: called with the report after each row, so that an interrupted benchmark keeps its results.
    """
    peak = platform.peak_flops(torch.bfloat16)
    report = LayerReport(plan=plan, machine=describe_machine(platform.device), peak_flops=peak, rows=[])
    if save is not None:
        save(report)  # fail before measuring if the folder cannot be written
    with groups_of_one_process(platform.communication) as groups:
        benchmark = LayerBenchmark(plan, meter, platform, groups)
        for row in _empty_rows(plan):
            report_progress(f"{row.title} ...")
            report.rows.append(benchmark.measure_row(row))
            report_progress(f"{row.title}: {report.rows[-1].summary}")
            if platform.is_cuda:
                torch.cuda.empty_cache()
            if save is not None:
                save(report)
    return report


def _empty_rows(plan: LayerPlan) -> list[LayerRow]:
    """Return empty rows: each of our mixers, followed by the peers if they have such a layer."""
    rows = []
    for shape, mixer in itertools.product(plan.shapes, plan.mixers):
        rows.append(LayerRow(mixer=mixer, shape=shape, maker=OURS))
        rows += [LayerRow(mixer=mixer, shape=shape, maker=peer) for peer in plan.peers if mixer in peers.LAYERS]
    return rows


class LayerBenchmark:
    """Measure rows one after the other.

    Args:
        plan: settings.
        meter: measures on the platform's device.
        platform: of the layers.
        groups: process groups of this process alone.
    """

    def __init__(self, plan: LayerPlan, meter: Meter, platform: Platform, groups: ProcessGroupCollection) -> None:
        self.seed, self.meter, self.platform, self.groups = plan.seed, meter, platform, groups

    def measure_row(self, row: LayerRow) -> LayerRow:
        """Return the row with measurements, or with the reason for having none; only our layers can fail."""
        # Makes a row independent of earlier ones: fla's weights, output gradients, and compilation for its shape.
        torch.manual_seed(self.seed)
        torch.compiler.reset()
        try:
            return self._ours(row) if row.maker == OURS else self._peer(row)
        except NotRun as reason:
            return replace(row, not_run=str(reason))
        except Exception as error:  # reported in the row, and the other rows still run
            message = one_line(error)
            return replace(row, failed=message) if row.maker == OURS else replace(row, not_run=message)

    def _ours(self, row: LayerRow) -> LayerRow:
        mixer = ours.build(row.mixer, row.shape, self.platform, self.groups, self.seed)
        layer = ours.as_layer(mixer)
        run = self._training_pass(layer, row.shape)
        # Before the check, which is smaller: kernels autotune at their first call.
        row = replace(row, choices=ours.choices(run), flops=mixer.training_flops(row.shape.length))
        agreement = ours.check(mixer, row.shape, self.seed, self.platform.device)
        row = replace(row, agreement=agreement)
        if agreement.failure is not None:
            return replace(row, failed=agreement.failure)
        torch.compiler.reset()  # a second length would trigger dynamic shapes
        return replace(row, measured=self._measure(layer, run))

    def _peer(self, row: LayerRow) -> LayerRow:
        layer = peers.build(row.mixer, row.shape, self.platform.device)
        return replace(row, note=layer.note, measured=self._measure(layer, self._training_pass(layer, row.shape)))

    def _training_pass(self, layer: Layer, shape: LayerShape) -> Callable[[], object]:
        sizes = {"length": shape.length, "batch": shape.batch, "hidden": shape.size.hidden}
        return training_pass(layer, hidden_states(layer, **sizes, seed=self.seed, device=self.platform.device))

    def _measure(self, layer: Layer, run: Callable[[], object]) -> Measured:
        times, memory = self.meter.time(run), self.meter.new_bytes(run)
        return Measured(times=times, memory=memory, parameters=sum(p.numel() for p in layer.parameters))
