"""Launches, tile sizes and buffers of the short convolution's Triton kernels."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_math import multiprocessors, next_power_of_two, on_device
from kernels.short_convolution import triton_backward, triton_forward
from kernels.short_convolution.reference import EPSILON


class Tuning(NamedTuple):
    """Tunable launch parameters of a kernel.

    Attributes:
        row_bytes: approximate bytes of a row of x per program, a power of two. 512 bytes are 16 per thread, the widest
            load.
        step: number of rows that are loaded at a time.
        least_chunk, most_chunk: minimum and maximum rows per program, multiples of `step`. Each chunk reads a few extra
            rows.
        programs: number of programs per multiprocessor that splitting sequences into chunks should reach.
    """

    row_bytes: int
    step: int
    least_chunk: int
    most_chunk: int
    programs: int


FORWARD = Tuning(row_bytes=256, step=4, least_chunk=32, most_chunk=64, programs=64)
BACKWARD = Tuning(row_bytes=256, step=2, least_chunk=32, most_chunk=256, programs=64)
"""Parameters in use. A benchmark may assign others."""

PARTIAL_ROWS, PARTIAL_BLOCK = 32, 32
"""Number of chunks and of channels that `sum_partials` loads at a time."""


@dataclass(frozen=True)
class Segment:
    """Division of one part into tiles. A dataclass, because Triton drops the field names of a named tuple.

    Attributes:
        start, width: first feature of the part within a unit, and number of features of the part.
        unit_length: True if the part's vectors are normalised. A tile then contains whole vectors.
        units, block: shape of a tile, powers of two.
        first, end: range of the part's tiles among all tiles of a row.
    """

    start: int
    width: int
    unit_length: bool
    units: int
    block: int
    first: int
    end: int


class LaunchPlan(NamedTuple):
    """Launch plan: rows per chunk, number of partial sums, grid size and compile-time constants."""

    chunk_length: int
    partials: int
    programs: int
    constants: dict[str, Any]


def cut_row(
    widths: Sequence[int], unit_length: Sequence[bool], num_head_groups: int, elements: int
) -> tuple[Segment, ...]:
    """Divide a row into tiles of about `elements` elements."""
    segments: list[Segment] = []
    start = first = 0
    for width, unit in zip(widths, unit_length, strict=True):
        block = next_power_of_two(width) if unit else min(next_power_of_two(width), elements)
        units = min(max(1, elements // block), next_power_of_two(num_head_groups))
        end = first + -(-num_head_groups // units) * -(-width // block)
        segments.append(Segment(start, width, unit, units, block, first, end))
        start, first = start + width, end
    return tuple(segments)


@lru_cache(maxsize=256)
def plan(
    shape: torch.Size,
    dtype: torch.dtype,
    taps: int,
    widths: tuple[int, ...],
    unit_length: tuple[bool, ...],
    tuning: Tuning,
    processors: int,
) -> LaunchPlan:
    """Return the launch plan for a shape and dtype of x.

    The plan is cached, because computing it takes longer than a launch.
    """
    length, batch, num_head_groups, width = shape
    segments = cut_row(widths, unit_length, num_head_groups, tuning.row_bytes // dtype.itemsize)
    tiles = segments[-1].end
    rows_per_program = -(-length * batch * tiles // (tuning.programs * processors))
    chunk_length = min(max(tuning.least_chunk, -(-rows_per_program // tuning.step) * tuning.step), tuning.most_chunk)
    partials = -(-length // chunk_length) * batch
    constants = {
        "U": num_head_groups,
        "W": width,
        "K": taps,
        "SEGMENTS": segments,
        "PROGRAMS": tiles,
        "STEP": tuning.step,
    }
    return LaunchPlan(chunk_length, partials, partials * tiles, {**constants, "EPSILON": EPSILON, "num_warps": 1})


def forward(
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    widths: tuple[int, ...],
    unit_length: tuple[bool, ...],
) -> list[Tensor]:
    """Run the forward kernel. Arguments and results as in `op.forward_operator`."""
    length, batch, num_head_groups, _ = x.shape
    launch_plan = plan(x.shape, x.dtype, weight.shape[-1], widths, unit_length, FORWARD, multiprocessors(x))
    outputs = [x.new_empty(batch, length, num_head_groups, width) for width in widths]
    with on_device(x):
        triton_forward.convolve[launch_plan.programs,](
            *_inputs(x, before, weight, bias), tuple(outputs), length, launch_plan.chunk_length, batch, **_strides(x),
            **launch_plan.constants,
        )  # fmt: skip
    return outputs


def backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    before: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    unit_length: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernels. Arguments and results as in `op.backward_operator`."""
    length, batch, num_head_groups, width = x.shape
    taps, num_sums = weight.shape[-1], weight.shape[-1] + (bias is not None)
    widths = tuple(y.shape[-1] for y in gradients)
    launch_plan = plan(x.shape, x.dtype, taps, widths, unit_length, BACKWARD, multiprocessors(x))
    dx, dbefore, dweight = (y.new_empty(y.shape) for y in (x, before, weight))
    dbias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    partials = x.new_empty(launch_plan.partials, num_sums, num_head_groups, width, dtype=torch.float32)
    with on_device(x):
        triton_backward.differentiate[launch_plan.programs,](
            *_inputs(x, before, weight, bias), tuple(y.contiguous() for y in gradients), dx, dbefore, partials,
            length, launch_plan.chunk_length, batch, **_strides(x), **launch_plan.constants,
        )  # fmt: skip
        triton_backward.sum_partials[-(-num_head_groups * width // PARTIAL_BLOCK), num_sums](
            partials, dweight, None if bias is None else dbias, launch_plan.partials, num_head_groups * width,
            K=taps, ROWS=PARTIAL_ROWS, BLOCK=PARTIAL_BLOCK, num_warps=4,
        )  # fmt: skip
    return dx, dbefore, dweight, dbias


def _inputs(x: Tensor, before: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return x, before.contiguous(), weight.contiguous(), None if bias is None else bias.contiguous()


def _strides(x: Tensor) -> dict[str, int]:
    # Triton only specialises on divisibility by 16, but 8 16-bit features already allow a load of 16 bytes.
    time, batch, unit, _ = x.stride()
    common = math.gcd(8, time, batch, unit)
    return {
        "time_stride": time // common, "batch_stride": batch // common, "unit_stride": unit // common, "ALIGN": common
    }  # fmt: skip
