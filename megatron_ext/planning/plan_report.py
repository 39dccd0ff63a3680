"""Report of a plan as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.planning.gpus import GIB, LINK_EFFICIENCY, MEASURED_GPU
from megatron_ext.planning.layouts import layout_overrides
from megatron_ext.planning.memory import USABLE_FRACTION, MemoryByPurpose
from megatron_ext.planning.plan import Machine, PlannedLayout
from megatron_ext.planning.step_time import OVERLAP_FRACTION
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.git_info import commit
from megatron_ext.utils.markdown import format_number, table, write_report

if TYPE_CHECKING:
    from megatron_ext.planning.shards import Shard
    from megatron_ext.planning.step_time import StepTime

HOUR = 3600.0


@dataclass(kw_only=True)
class PlanReport:
    """Result of `selectron plan`.

    Attributes:
        name: name of the configuration.
        overrides: overrides from the command line.
        machine: machine that the plan is for.
        vocabulary: vocabulary size and its origin.
        tokens: number of training tokens.
        price: price of a GPU hour; None to report only GPU hours.
        planned: configured layout; None if layouts were searched.
        layouts: all searched layouts, the best first.
        shown: number of layouts to show.
        shards: model shard of each rank; empty if not requested.
        batch: configured and planned global batch size; None if the configured batch is divisible and so is planned.
    """

    name: str
    overrides: tuple[str, ...]
    machine: Machine
    vocabulary: str
    tokens: float
    price: float | None
    planned: PlannedLayout | None = None
    layouts: list[PlannedLayout] = field(default_factory=list)
    shown: int = 0
    shards: list[Shard] = field(default_factory=list)
    batch: tuple[int, int] | None = None

    @property
    def fits(self) -> bool:
        """True if at least one layout fits."""
        return any(layout.rejection is None for layout in self._all)

    @property
    def _all(self) -> list[PlannedLayout]:
        """Planned layouts: the configured layout, or all searched layouts."""
        return self.layouts if self.planned is None else [self.planned]

    def markdown(self) -> str:
        """Return the plan as Markdown."""
        machine = self.machine
        gpus = f"{machine.world_size} x {machine.gpu.name.upper()}"
        where = f"{gpus} ({machine.nodes} nodes of {machine.per_node})" if machine.nodes > 1 else gpus
        lines = [f"# {self.name} on {where}", "", f"Vocabulary: {self.vocabulary}."]
        if self.overrides:
            lines += ["", f"With `{' '.join(self.overrides)}`."]
        if self.batch is not None:
            configured, planned = self.batch
            problem = f"{configured} samples per step cannot be divided among the replicas"
            lines += ["", f"{problem}: planned with `training.global_batch_size={planned}`."]
        if self.planned is not None:
            lines += ["", *self._layout_section(self.planned)]
        if self.layouts:
            lines += ["", *self._search_section()]
        if self.shards:
            lines += ["", *_shards_section(self.shards)]
        return "\n".join([*lines, "", *self._assumptions()])

    def write(self, folder: Path) -> None:
        """Write plan.json and plan.md.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_report(folder, "plan", self.as_dict(), self.markdown() + "\n")
        except OSError as error:
            raise UserError(
                "--output", f"{folder} cannot be written ({os_error_reason(error)})", "choose another folder"
            ) from error

    def as_dict(self) -> dict[str, Any]:
        """Return the whole plan as plain values, in bytes and seconds."""
        return {
            "configuration": self.name,
            "overrides": list(self.overrides),
            "commit": commit(),
            "gpu": asdict(self.machine.gpu),
            "nodes": self.machine.nodes,
            "gpus_per_node": self.machine.per_node,
            "vocabulary": self.vocabulary,
            "tokens": self.tokens,
            "global_batch_size": dict(zip(("configured", "planned"), self.batch, strict=True)) if self.batch else None,
            "layouts": [self._layout_as_dict(layout) for layout in self._all],
            "ranks": [asdict(shard) for shard in self.shards],
        }

    def _layout_as_dict(self, layout: PlannedLayout) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "layout": layout_overrides(layout.config),
            "replicas": layout.replicas,
            "micro_batches": layout.micro_batches,
            "refused": layout.rejection,
            "memory": [asdict(memory) | {"total": memory.total} for memory in layout.memory],
        }
        if layout.time is None:
            return fields | {"untimed": layout.untimed_reason}
        time = layout.time
        cost = {"gpu_hours": self._gpu_hours(time), "price": self._price(time)}
        speeds = {"seconds_per_step": time.seconds, "tokens_per_second": time.tokens_per_second}
        return (
            fields
            | speeds
            | cost
            | {
                "not_measured": list(time.not_measured),
                "parts": time.parts,
                "volumes": {k: asdict(v) for k, v in time.volumes.items()},
            }
        )

    # --- one layout ---------------------------------------------------------------------------------------------------

    def _layout_section(self, layout: PlannedLayout) -> list[str]:
        parallel, training = layout.config.parallel, layout.config.training
        memory = layout.largest_memory
        layers = sorted(memory.by_layer.items())
        lines = [
            f"Tensor {parallel.tensor}, context {parallel.context}, pipeline {parallel.pipeline}, data "
            f"{layout.replicas}; {layout.micro_batches} micro-batches of {training.micro_batch_size} per step; "
            f"recomputed: {training.recompute}; optimizer: {layout.config.optimizer.sharding}.",
            "",
            f"**Does not fit**: {layout.rejection}." if layout.rejection else f"**Fits**: {self._memory_use(memory)}.",
            "",
            *_memory_table(layout.memory),
        ]
        if layers:
            least, most = min(size for _, size in layers), max(size for _, size in layers)
            span = (
                f"{format_number(most / GIB)}"
                if least == most
                else f"{format_number(least / GIB)} to {format_number(most / GIB)}"
            )
            lines += [
                "",
                f"Saved by the forward pass for each of {len(layers)} layers of rank {memory.rank}: {span} GiB.",
            ]
        if layout.time is None:
            return [*lines, "", f"No time: {layout.untimed_reason}."]
        return [*lines, "", *self._time_section(layout.time), *_not_measured([layout])]

    def _memory_use(self, memory: MemoryByPurpose) -> str:
        usable = USABLE_FRACTION * self.machine.gpu.memory
        return f"{memory.total / GIB:.1f} GiB of {usable / GIB:.1f} usable on rank {memory.rank}, which uses most"

    def _time_section(self, time: StepTime) -> list[str]:
        per_gpu = time.tokens_per_second / self.machine.world_size
        pace = f"{1e3 * time.seconds:,.0f} ms per step, {time.tokens_per_second:,.0f} tokens/s"
        speed = f"**{pace}** ({per_gpu:,.0f} per GPU)"
        hours = self._gpu_hours(time)
        days = hours / self.machine.world_size / 24
        cost = f"{self.tokens:,.0f} tokens: {days:,.1f} days, {hours:,.0f} GPU hours"
        price = self._price(time)
        if price is not None:
            cost += f", {price:,.0f} at {self.price} per hour"
        rows = [
            [part, format_number(1e3 * seconds), f"{100 * seconds / time.seconds:.0f} %"]
            for part, seconds in time.parts.items()
            if seconds
        ]
        lines = [f"{speed}. {cost}.", "", *table(("part of a step", "ms", "share"), rows)]
        if time.volumes:
            sent = [
                [name, format_number(volume.within_node / 1e9), format_number(volume.between_nodes / 1e9)]
                for name, volume in time.volumes.items()
            ]
            lines += ["", *table(("sent by a rank per step", "GB over NVLink", "GB over the network"), sent)]
        return lines

    def _gpu_hours(self, time: StepTime) -> float:
        return self.tokens / time.tokens_per_second * self.machine.world_size / HOUR

    def _price(self, time: StepTime) -> float | None:
        return None if self.price is None else self._gpu_hours(time) * self.price

    # --- several layouts ----------------------------------------------------------------------------------------------

    def _search_section(self) -> list[str]:
        fitting = [layout for layout in self.layouts if layout.rejection is None]
        large = [layout for layout in self.layouts if layout.rejection is not None and layout.memory]
        broken = [layout for layout in self.layouts if not layout.memory]
        lines = [
            f"{len(self.layouts)} layouts: {len(fitting)} fit, {len(large)} do not fit, {len(broken)} break a rule."
        ]
        rows = [self._row(layout) for layout in fitting[: self.shown]]
        if rows:
            lines += ["", *table(("tokens/s", "ms per step", "GiB", "replicas x micro-batches", "overrides"), rows)]
            lines += _not_measured(fitting)
        if large:
            lines += ["", "Smallest layouts that do not fit:", ""]
            lines += [f"* `{layout_overrides(layout.config)}`: {layout.rejection}" for layout in large[:3]]
        by_rule: dict[str, PlannedLayout] = {}
        for layout in broken:
            by_rule.setdefault(str(layout.rejection).split(":", 1)[0], layout)
        if by_rule:
            lines += ["", "Broken rules, each with one layout that breaks it:", ""]
            lines += [f"* `{layout_overrides(layout.config)}`: {layout.rejection}" for layout in by_rule.values()]
        return lines

    def _row(self, layout: PlannedLayout) -> list[str]:
        speed, step = "", ""
        if layout.time is not None:
            speed, step = f"{layout.time.tokens_per_second:,.0f}", f"{1e3 * layout.time.seconds:,.0f}"
        memory, batches = f"{layout.largest_memory.total / GIB:.1f}", f"{layout.replicas} x {layout.micro_batches}"
        return [speed, step, memory, batches, f"`{layout_overrides(layout.config)}`"]

    def _assumptions(self) -> list[str]:
        lines = [
            "Memory is that of the tensors in a dry run of the real model. The CUDA context and NCCL need more. "
            "Compute time is model FLOPs divided by rates measured on one H200, mostly with hidden size 2,048, or "
            "bytes divided by the measured memory bandwidth. The head exchange has the bandwidth measured between two "
            f"H100s, other communication {LINK_EFFICIENCY:.0%} of the data sheet's (assumed). Only head exchanges in "
            f"rounds overlap with computation: {OVERLAP_FRACTION['copy_engine']:.0%} of their time with copy engines, "
            f"{OVERLAP_FRACTION['nccl']:.0%} with NCCL (rounds of samples only)."
        ]
        if self.machine.gpu.name != MEASURED_GPU:
            lines += ["", f"Rates are scaled from the H200 to the {self.machine.gpu.name.upper()} by data sheets."]
        return lines


def _not_measured(layouts: Sequence[PlannedLayout]) -> list[str]:
    """Return a paragraph on the mixers whose rates are assumed, or nothing."""
    mixers = sorted({mixer for layout in layouts if layout.time for mixer in layout.time.not_measured})
    if not mixers:
        return []
    return ["", f"Not measured: {', '.join(mixers)}. Such a mixer is timed at the median rate of the measured mixers."]


def _memory_table(memory: Sequence[MemoryByPurpose]) -> list[str]:
    kinds = list(dict.fromkeys(kind for rank in memory for kind in rank.kinds))
    rows = [[kind, *(_gib(rank.kinds.get(kind, 0.0)) for rank in memory)] for kind in kinds]
    rows = [row for row in rows if any(row[1:])] + [["all", *(_gib(rank.total) for rank in memory)]]
    columns = [f"rank {rank.rank}" + (f", stage {rank.stage}" if len(memory) > 1 else "") for rank in memory]
    return table(("GiB at the peak", *columns), rows)


def _gib(size: float) -> str:
    return "" if size < GIB / 1000 else format_number(size / GIB)


def _shards_section(shards: Sequence[Shard]) -> list[str]:
    from megatron_ext.planning.shards import whole_model

    least, most = min(shard.parameters for shard in shards), max(shard.parameters for shard in shards)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return [f"Built on each of {len(shards)} ranks: {each} parameters; {whole_model(shards):,} in the whole model."]
