"""The order of the selective scan's Triton kernels, their sizes and their buffers."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.selective_scan import triton_backward, triton_forward
from kernels.triton_math import multiprocessors, next_power_of_two, on_device

WARP = 32
JOIN_BLOCK = 128


class Tuning(NamedTuple):
    """What may be chosen freely; powers of two all but the last three.

    Attributes:
        span: tokens between the states that the backward pass finds kept.
        step: of them, those whose states it has in registers, fewer where a lane has many numbers; divides span.
        forward_numbers, backward_numbers: of the state that a lane has, about.
        backward_registers: a lane's, at most; None: as many as the compiler likes.
        least_chunk: tokens that a chunk has at least, a multiple of span.
        alone: programs a multiprocessor from which on chunks are not cut: their ends cost a pass of their own.
        programs: a multiprocessor, to reach by cutting chunks.
        parts: sums of dB and dC, each over some of the channels, that are written; each is as large as fp32 B.
    """

    span: int = 16
    step: int = 4
    forward_numbers: int = 16
    backward_numbers: int = 8
    backward_registers: int | None = 128
    least_chunk: int = 128
    alone: int = 12
    programs: int = 64
    parts: int = 16


TUNING = Tuning()
"""Replace it to measure others."""


class Rows(NamedTuple):
    """How tokens lie in rows: token t of sample s is row s * sample_stride + t * time_stride."""

    samples: int
    length: int
    sample_stride: int
    time_stride: int


class Blocks(NamedTuple):
    """A tile's shape, see `triton_tile`, and how many blocks of its channels make a group."""

    NR: int
    ER: int
    NL: int
    EL: int
    group_blocks: int

    @property
    def numbers(self) -> int:
        """Of a state tile that a lane has."""
        return self.NR * self.ER

    @property
    def channels(self) -> int:
        """Of a tile."""
        return self.ER * self.EL

    def constants(self) -> dict[str, int]:
        """Compile-time arguments and launch of the kernels that have such a tile."""
        return {"NR": self.NR, "ER": self.ER, "NL": self.NL, "EL": self.EL, "num_warps": 1}


class Chunks(NamedTuple):
    """How a sample's tokens are cut."""

    chunk_length: int
    chunks: int


def cut_blocks(group_channels: int, size: int, numbers: int) -> Blocks:
    """Tiles of about `numbers` a lane for states of `size`; no more channels than a group has."""
    n_lanes = min(size, 4)
    lanes = WARP // n_lanes
    per_lane = size // n_lanes
    rows = min(max(1, numbers // per_lane), next_power_of_two(-(-group_channels // lanes)))
    return Blocks(per_lane, rows, n_lanes, lanes, -(-group_channels // (rows * lanes)))


def cut_chunks(x: Tensor, length: int, programs: int) -> Chunks:
    """Cut the tokens so that the GPU is busy; `programs`: of a chunk, in all samples."""
    processors = multiprocessors(x)
    if programs >= TUNING.alone * processors:
        return Chunks(length, 1)
    wanted = -(-TUNING.programs * processors // programs)
    chunk_length = max(TUNING.least_chunk, -(-length // (wanted * TUNING.span)) * TUNING.span)
    return Chunks(chunk_length, -(-length // chunk_length)) if chunk_length < length else Chunks(length, 1)


def forward(
    rows: Rows, training: bool, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernels. All tensors are contiguous; `training` keeps what the gradient needs.

    Args:
        rows: where tokens lie.
        training: whether there will be a backward pass.
        x: [rows, c], as two or more dimensions.
        dt: fp32, of x's shape.
        A: fp32 [c, n], n a power of two.
        B: [rows, g, n].
        C: of B's shape.
        D: fp32 [c].
        first: fp32 [samples, c, n], the state before the first token.

    Returns:
        y: of x's shape and dtype.
        last: the state after the last token, fp32 [samples, c, n].
        kept: states between spans, fp32 [samples, spans, c, n]; empty unless training.
    """
    (channels, size), groups = A.shape, B.shape[-2]
    blocks = cut_blocks(channels // groups, size, TUNING.forward_numbers)
    programs = rows.samples * groups * blocks.group_blocks
    chunks = cut_chunks(x, rows.length, programs)
    numbers = (rows.length, *chunks, blocks.group_blocks, channels // groups, rows.sample_stride, rows.time_stride, 1)
    constants = {"G": groups, "N": size, **blocks.constants()}
    spans = -(-rows.length // TUNING.span) if training else 0
    y, last, kept = torch.empty_like(x), torch.empty_like(first), A.new_empty(rows.samples, spans, channels, size)
    grid = (programs * chunks.chunks,)
    with on_device(x):
        before = first
        if chunks.chunks > 1:
            before, spent = _chunk_buffers(rows, chunks, A)
            triton_forward.find_chunk_ends[grid](x, dt, A, B, before, spent, *numbers, **constants)
            _join_chunks(before, spent, A, first, reverse=False)
        triton_forward.walk_forward[grid](
            x, dt, A, B, C, D, before, y, kept, last, *numbers, SPAN=TUNING.span, KEEP=training, **constants
        )
    return y, last, kept


def _chunk_buffers(rows: Rows, chunks: Chunks, A: Tensor) -> tuple[Tensor, Tensor]:
    """A state a chunk, and its channels' sums of dt."""
    ends = A.new_empty(rows.samples, chunks.chunks, *A.shape)
    return ends, A.new_empty(ends.shape[:3])


def _join_chunks(ends: Tensor, spent: Tensor, A: Tensor, first: Tensor, *, reverse: bool) -> None:
    samples, chunks, channels, size = ends.shape
    triton_forward.join_chunks[samples, -(-channels * size // JOIN_BLOCK)](
        ends, spent, A, first, chunks, channels, N=size, REVERSED=reverse, BLOCK=JOIN_BLOCK, num_warps=1
    )


def backward(
    rows: Rows, dy: Tensor, dlast: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    kept: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients (dx, ddt, dA, dB, dC, dD, dfirst) for those of y and last; dx in x's dtype, all others in fp32.

    Arguments as in `forward`, all contiguous.
    """
    (channels, size), groups = A.shape, B.shape[-2]
    num_rows = rows.samples * rows.length
    blocks = cut_blocks(channels // groups, size, TUNING.backward_numbers)
    step = max(1, TUNING.step // -(-blocks.numbers // TUNING.backward_numbers))
    whole = (channels // groups) % blocks.channels == 0 and rows.length % step == 0
    part_blocks = -(-blocks.group_blocks // max(1, TUNING.parts // groups))
    parts = -(-blocks.group_blocks // part_blocks)
    chunks = cut_chunks(x, rows.length, rows.samples * groups * parts)
    after = dlast
    if chunks.chunks > 1:
        after = _adjoint_after_chunks(rows, chunks, dy, dlast, dt, A, C)
    dx, ddt, dfirst = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(dlast)
    dA, dD = A.new_empty(rows.samples * chunks.chunks, *A.shape), D.new_empty(rows.samples * chunks.chunks, channels)
    dB, dC = (A.new_empty(parts, num_rows, groups, size) for _ in "BC")
    with on_device(x):
        triton_backward.walk_backward[rows.samples * chunks.chunks * groups * parts,](
            dy, x, dt, A, B, C, D, kept, after, dx, ddt, dA, dB, dC, dD, dfirst, rows.length, num_rows, *chunks,
            parts, part_blocks, blocks.group_blocks, channels // groups, rows.sample_stride, rows.time_stride, 1,
            G=groups, N=size, SPAN=TUNING.span, STEP=step, WHOLE=whole, maxnreg=TUNING.backward_registers,
            **blocks.constants(),
        )  # fmt: skip
    return dx, ddt, dA.sum(0), dB.sum(0).view(B.shape), dC.sum(0).view(C.shape), dD.sum(0), dfirst


def _adjoint_after_chunks(
    rows: Rows, chunks: Chunks, dy: Tensor, dlast: Tensor, dt: Tensor, A: Tensor, C: Tensor
) -> Tensor:
    """The adjoint of the state after each chunk, fp32 [samples, chunks, c, n]."""
    (channels, size), groups = A.shape, C.shape[-2]
    blocks = cut_blocks(channels // groups, size, TUNING.forward_numbers)
    after, spent = _chunk_buffers(rows, chunks, A)
    with on_device(dy):
        triton_backward.find_chunk_starts[rows.samples * chunks.chunks * groups * blocks.group_blocks,](
            dy, dt, A, C, after, spent, rows.length, *chunks, blocks.group_blocks, channels // groups,
            rows.sample_stride, rows.time_stride, 1, G=groups, N=size, **blocks.constants(),
        )  # fmt: skip
        _join_chunks(after, spent, A, dlast, reverse=True)
    return after
