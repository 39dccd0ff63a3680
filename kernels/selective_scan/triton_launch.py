"""Launch sequence, tile sizes and buffers of the selective scan's Triton kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.rows import Rows
from kernels.common.triton_math import multiprocessors, next_power_of_two, on_device
from kernels.selective_scan import triton_backward, triton_forward

WARP = 32
JOIN_BLOCK, JOIN_AHEAD = 128, 8


class Tuning(NamedTuple):
    """Tunable launch parameters.

    Attributes:
        span: number of tokens from one state that is saved for the backward pass to the next.
        step: number of tokens whose states the backward pass keeps in registers at a time, less for large tiles. It
            must divide `span`.
        forward_elements, backward_elements: approximate number of state elements per thread, a power of two.
        forward_registers, backward_registers: maximum registers per thread; None to let the compiler choose.
        least_chunk: minimum tokens per chunk, a multiple of `span`.
        alone: number of programs per multiprocessor from which sequences are not split into chunks, because splitting
            costs a second pass.
        programs: number of programs per multiprocessor that splitting sequences into chunks should reach.
        parts: number of partial sums of dB and dC over blocks of channels. Each takes as much memory as B in fp32.
    """

    span: int = 16
    step: int = 4
    forward_elements: int = 16
    backward_elements: int = 8
    forward_registers: int | None = 96
    backward_registers: int | None = 128
    least_chunk: int = 128
    alone: int = 12
    # Slightly below a whole number of waves: registers suffice for 21 programs per multiprocessor forward, 16 backward.
    programs: int = 126
    parts: int = 16


TUNING = Tuning()
"""Parameters in use. A benchmark may assign others."""


class Chunks(NamedTuple):
    """Division of a sample's tokens into chunks."""

    chunk_length: int
    chunks: int


class Blocks(NamedTuple):
    """Division of channels into blocks: tile shape (see `triton_tile`), groups and channels per group."""

    NR: int
    ER: int
    NL: int
    EL: int
    groups: int
    group_channels: int

    @property
    def group_blocks(self) -> int:
        """Number of blocks of channels per group."""
        return -(-self.group_channels // (self.ER * self.EL))

    @property
    def is_whole(self) -> bool:
        """True if every block has all its channels."""
        return self.group_channels % (self.ER * self.EL) == 0

    def constants(self, registers: int | None) -> dict[str, Any]:
        """Return the compile-time arguments and launch options of kernels with this tile."""
        tile = {"NR": self.NR, "ER": self.ER, "NL": self.NL, "EL": self.EL}
        return {"G": self.groups, "N": self.NR * self.NL, **tile, "num_warps": 1, "maxnreg": registers}


def cut_channels(A: Tensor, groups: int, elements: int) -> Blocks:
    """Choose a tile of about `elements` state elements per thread, with at most a group's channels."""
    channels, size = A.shape
    n_lanes = min(size, 4)
    e_lanes, n_rows = WARP // n_lanes, size // n_lanes
    e_rows = min(max(1, elements // n_rows), next_power_of_two(-(-channels // (groups * e_lanes))))
    return Blocks(n_rows, e_rows, n_lanes, e_lanes, groups, channels // groups)


def cut_tokens(x: Tensor, rows: Rows, programs: int) -> Chunks:
    """Choose chunks that occupy the GPU, given the number of programs per chunk of a sample."""
    programs, processors = rows.samples * programs, multiprocessors(x)
    num_chunks = 1 if programs >= TUNING.alone * processors else -(-TUNING.programs * processors // programs)
    chunk_length = max(TUNING.least_chunk, -(-rows.length // (num_chunks * TUNING.span)) * TUNING.span)
    if num_chunks == 1 or chunk_length >= rows.length:
        return Chunks(rows.length, 1)
    return Chunks(chunk_length, -(-rows.length // chunk_length))


def forward(
    rows: Rows, training: bool, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernels. All tensors are contiguous.

    Args:
        rows: layout of the tokens.
        training: True if there will be a backward pass.
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
        saved_states: states between spans, fp32 [samples, spans, c, n]; empty unless training.
    """
    blocks = cut_channels(A, B.shape[-2], TUNING.forward_elements)
    chunks = cut_tokens(x, rows, blocks.groups * blocks.group_blocks)
    before = first
    if chunks.chunks > 1:
        before = _combine_chunks(triton_forward.find_chunk_ends, rows, chunks, x, dt, A, B, first, reverse=False)
    spans = -(-rows.length // TUNING.span) if training else 0
    y, last, saved_states = torch.empty_like(x), torch.empty_like(first), A.new_empty(rows.samples, spans, *A.shape)
    with on_device(x):
        triton_forward.scan_forward[_programs(rows, chunks, blocks),](
            x, dt, A, B, C, D, before, y, saved_states, last, *_scalar_arguments(rows, chunks, blocks),
            WHOLE=blocks.is_whole, SPAN=TUNING.span, KEEP=training, **blocks.constants(TUNING.forward_registers),
        )  # fmt: skip
    return y, last, saved_states


def _programs(rows: Rows, chunks: Chunks, blocks: Blocks) -> int:
    return rows.samples * chunks.chunks * blocks.groups * blocks.group_blocks


def _scalar_arguments(rows: Rows, chunks: Chunks, blocks: Blocks) -> tuple[int, ...]:
    """Return the scalar arguments of the kernels with one block per program, from `length` to `unit`."""
    cuts = (*chunks, blocks.group_blocks, blocks.group_channels)
    return (rows.length, *cuts, rows.sample_stride, rows.time_stride, 1)


def _combine_chunks(
    find: Any, rows: Rows, chunks: Chunks, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, first: Tensor, *, reverse: bool
) -> Tensor:
    """Return each chunk's initial state, or in reverse its final adjoint, fp32 [samples, chunks, c, n].

    `find` is the kernel that computes a chunk's final state from zeros. x and B are its first and fourth tensor.
    """
    blocks = cut_channels(A, B.shape[-2], TUNING.forward_elements)
    ends = A.new_empty(rows.samples, chunks.chunks, *A.shape)
    dt_sums = A.new_empty(ends.shape[:3])
    with on_device(x):
        find[_programs(rows, chunks, blocks),](
            x, dt, A, B, ends, dt_sums, *_scalar_arguments(rows, chunks, blocks),
            WHOLE=blocks.is_whole, **blocks.constants(TUNING.forward_registers),
        )  # fmt: skip
        triton_forward.join_chunks[rows.samples, -(-A.numel() // JOIN_BLOCK)](
            ends, dt_sums, A, first, chunks.chunks, A.shape[0],
            N=A.shape[1], REVERSED=reverse, BLOCK=JOIN_BLOCK, AHEAD=JOIN_AHEAD, num_warps=1,
        )  # fmt: skip
    return ends


def backward(
    rows: Rows, dy: Tensor, dlast: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    saved_states: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients (dx, ddt, dA, dB, dC, dD, dfirst), given those of y and last.

    dx has x's dtype, all others are fp32. Arguments as in `forward`, all contiguous.
    """
    blocks = cut_channels(A, B.shape[-2], TUNING.backward_elements)
    step = max(1, TUNING.step // -(-blocks.NR * blocks.ER // TUNING.backward_elements))
    part_blocks = -(-blocks.group_blocks // max(1, TUNING.parts // blocks.groups))
    parts = -(-blocks.group_blocks // part_blocks)
    chunks = cut_tokens(x, rows, blocks.groups * parts)
    after = dlast
    if chunks.chunks > 1:
        after = _combine_chunks(triton_backward.find_chunk_starts, rows, chunks, dy, dt, A, C, dlast, reverse=True)
    num_chunks, num_rows = rows.samples * chunks.chunks, rows.samples * rows.length
    dx, ddt, dfirst = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(dlast)
    dA, dD = A.new_empty(num_chunks, *A.shape), A.new_empty(num_chunks, A.shape[0])
    dB, dC = (A.new_empty(parts, *B.shape) for _ in "BC")
    with on_device(x):
        triton_backward.scan_backward[num_chunks * blocks.groups * parts,](
            dy, x, dt, A, B, C, D, saved_states, after, dx, ddt, dA, dB, dC, dD, dfirst, rows.length, num_rows, *chunks,
            parts, part_blocks, blocks.group_blocks, blocks.group_channels, rows.sample_stride, rows.time_stride, 1,
            WHOLE=blocks.is_whole and rows.length % step == 0, SPAN=TUNING.span, STEP=step,
            **blocks.constants(TUNING.backward_registers),
        )  # fmt: skip
    return dx, ddt, *(y.sum(0) for y in (dA, dB, dC, dD)), dfirst
