"""Report of a plan as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.planning.gpus import GIB, MEASURED
from megatron_ext.planning.layouts import differences
from megatron_ext.planning.memory import USABLE, MemoryByPurpose
from megatron_ext.planning.plan import Machine, Planned
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
    planned: Planned | None = None
    layouts: list[Planned] = field(default_factory=list)
    shown: int = 0
    shards: list[Shard] = field(default_factory=list)
    batch: tuple[int, int] | None = None

    @property
    def fits(self) -> bool:
        """True if at least one layout fits."""
        return any(one.refused is None for one in self._all)

    @property
    def _all(self) -> list[Planned]:
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
            told = f"{configured} samples a step do not divide by so many replicas: planned with **{planned}**"
            lines += ["", f"{told}, as `training.global_batch_size={planned}` would train it."]
        if self.planned is not None:
            lines += ["", *self._about(self.planned)]
        if self.layouts:
            lines += ["", *self._searched()]
        if self.shards:
            lines += ["", *_sharded(self.shards)]
        return "\n".join([*lines, "", *self._assumed()])

    def write(self, folder: Path) -> None:
        """Write plan.json and plan.md.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_report(folder, "plan", self.numbers(), self.markdown() + "\n")
        except OSError as error:
            raise UserError(
                "--output", f"{folder} cannot be written ({os_error_reason(error)})", "choose another folder"
            ) from error

    def numbers(self) -> dict[str, Any]:
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
            "layouts": [self._numbers_of(one) for one in self._all],
            "ranks": [asdict(shard) for shard in self.shards],
        }

    def _numbers_of(self, one: Planned) -> dict[str, Any]:
        found: dict[str, Any] = {
            "layout": differences(one.config),
            "replicas": one.replicas,
            "micro_batches": one.micro_batches,
            "refused": one.refused,
            "memory": [asdict(memory) | {"total": memory.total} for memory in one.memory],
        }
        if one.time is None:
            return found | {"untimed": one.untimed}
        time = one.time
        cost = {"gpu_hours": self._gpu_hours(time), "price": self._price(time)}
        speeds = {"seconds_per_step": time.seconds, "tokens_per_second": time.tokens_per_second}
        return (
            found
            | speeds
            | cost
            | {
                "not_measured": list(time.not_measured),
                "parts": time.parts,
                "volumes": {k: asdict(v) for k, v in time.volumes.items()},
            }
        )

    # --- one layout --------------------------------------------------------------------------------------------------

    def _about(self, one: Planned) -> list[str]:
        parallel = one.config.parallel
        micro = one.config.training.micro_batch_size
        lines = [
            f"Tensor {parallel.tensor}, context {parallel.context}, pipeline {parallel.pipeline}, data "
            f"{one.replicas}; {one.micro_batches} micro-batches of {micro} a step; recomputed: "
            f"{one.config.training.recompute}; optimizer: {one.config.optimizer.sharding}.",
            "",
            f"**Does not fit**: {one.refused}." if one.refused else f"**Fits**: {self._room(one.most)}.",
            "",
            *_memory_table(one.memory),
        ]
        layers = sorted(one.most.by_layer.items())
        if layers:
            least, most = min(size for _, size in layers), max(size for _, size in layers)
            span = (
                f"{format_number(most / GIB)}"
                if least == most
                else f"{format_number(least / GIB)} to {format_number(most / GIB)}"
            )
            lines += [
                "",
                f"Kept by the forward pass for each of {len(layers)} layers of rank {one.most.rank}: {span} GiB.",
            ]
        if one.time is None:
            return [*lines, "", f"No time: {one.untimed}."]
        return [*lines, "", *self._timed(one.time), *_not_measured([one])]

    def _room(self, memory: MemoryByPurpose) -> str:
        usable = USABLE * self.machine.gpu.memory
        return f"{memory.total / GIB:.1f} GiB of {usable / GIB:.1f} usable on rank {memory.rank}, which takes most"

    def _timed(self, time: StepTime) -> list[str]:
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
            lines += ["", *table(("a rank sends per step", "GB over NVLink", "GB over the network"), sent)]
        return lines

    def _gpu_hours(self, time: StepTime) -> float:
        return self.tokens / time.tokens_per_second * self.machine.world_size / HOUR

    def _price(self, time: StepTime) -> float | None:
        return None if self.price is None else self._gpu_hours(time) * self.price

    # --- many --------------------------------------------------------------------------------------------------------

    def _searched(self) -> list[str]:
        good = [one for one in self.layouts if one.refused is None]
        large = [one for one in self.layouts if one.refused is not None and one.memory]
        broken = [one for one in self.layouts if not one.memory]
        lines = [f"{len(self.layouts)} layouts: {len(good)} fit, {len(large)} do not, {len(broken)} break a rule."]
        rows = [self._row(one) for one in good[: self.shown]]
        if rows:
            lines += ["", *table(("tokens/s", "ms per step", "GiB", "replicas x micro-batches", "overrides"), rows)]
            lines += _not_measured(good)
        if large:
            lines += ["", "The smallest that do not fit:", ""]
            lines += [f"* `{differences(one.config)}`: {one.refused}" for one in large[:3]]
        reasons: dict[str, Planned] = {}
        for one in broken:
            reasons.setdefault(str(one.refused).split(":", 1)[0], one)
        if reasons:
            lines += ["", "Rules that layouts break, with one of each:", ""]
            lines += [f"* `{differences(one.config)}`: {one.refused}" for one in reasons.values()]
        return lines

    def _row(self, one: Planned) -> list[str]:
        speed, step = "", ""
        if one.time is not None:
            speed, step = f"{one.time.tokens_per_second:,.0f}", f"{1e3 * one.time.seconds:,.0f}"
        room, spread = f"{one.most.total / GIB:.1f}", f"{one.replicas} x {one.micro_batches}"
        return [speed, step, room, spread, f"`{differences(one.config)}`"]

    def _assumed(self) -> list[str]:
        lines = [
            "Memory is what a step of the real model keeps, gone through without computing; CUDA's context and NCCL "
            "come on top. Times are model FLOPs at rates measured on one H200, mostly at 2,048 wide, and bytes at "
            "measured bandwidth; exchanged heads as measured on two H100s, other links at 80 % of the data sheet, not "
            "measured; and nothing overlapped but half of what copy engines exchange in rounds."
        ]
        if self.machine.gpu.name != MEASURED:
            lines += ["", f"Rates are scaled from the H200 to the {self.machine.gpu.name.upper()} by data sheets."]
        return lines


def _not_measured(layouts: Sequence[Planned]) -> list[str]:
    """Return a paragraph on the mixers whose rates are assumed, or nothing."""
    mixers = sorted({mixer for one in layouts if one.time for mixer in one.time.not_measured})
    if not mixers:
        return []
    return ["", f"Not measured: {', '.join(mixers)}. Such a mixer is timed at the median rate of the measured mixers."]


def _memory_table(memory: Sequence[MemoryByPurpose]) -> list[str]:
    kinds = list(dict.fromkeys(kind for one in memory for kind in one.kinds))
    rows = [[kind, *(_gib(one.kinds.get(kind, 0.0)) for one in memory)] for kind in kinds]
    rows = [row for row in rows if any(row[1:])] + [["all", *(_gib(one.total) for one in memory)]]
    heads = [f"rank {one.rank}" + (f", stage {one.stage}" if len(memory) > 1 else "") for one in memory]
    return table(("GiB at its peak", *heads), rows)


def _gib(size: float) -> str:
    return "" if size < GIB / 1000 else format_number(size / GIB)


def _sharded(shards: Sequence[Shard]) -> list[str]:
    from megatron_ext.planning.shards import whole_model

    least, most = min(shard.parameters for shard in shards), max(shard.parameters for shard in shards)
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return [f"Built on each of {len(shards)} ranks: {each} parameters; together one model of {whole_model(shards):,}."]
