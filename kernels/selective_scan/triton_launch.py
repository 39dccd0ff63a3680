"""The order of the selective scan's Triton kernels, their sizes and their buffers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.rows import Rows
from kernels.selective_scan import triton_backward, triton_forward
from kernels.triton_math import multiprocessors, next_power_of_two, on_device

WARP = 32
JOIN_BLOCK, JOIN_AHEAD = 128, 8


class Tuning(NamedTuple):
    """What may be chosen freely.

    Attributes:
        span: tokens between the states that the backward pass finds kept.
        step: of them, those whose states it has in registers, fewer where a lane has many numbers; divides span.
        forward_numbers, backward_numbers: of the state that a lane has, about; powers of two.
        forward_registers, backward_registers: a lane's, at most; None: as many as the compiler likes.
        least_chunk: tokens that a chunk has at least, a multiple of span.
        alone: programs a multiprocessor from which on chunks are not cut: their ends cost a pass of their own.
        programs: a multiprocessor, to reach by cutting chunks.
        parts: sums of dB and dC, each over some of the channels, that are written; each is as large as B in fp32.
    """

    span: int = 16
    step: int = 4
    forward_numbers: int = 16
    backward_numbers: int = 8
    forward_registers: int | None = 96
    backward_registers: int | None = 128
    least_chunk: int = 128
    alone: int = 12
    # A little below whole rounds: a multiprocessor's registers are enough for 21 programs forward, 16 backward.
    programs: int = 126
    parts: int = 16


TUNING = Tuning()
"""Replace it to measure others."""


class Chunks(NamedTuple):
    """How a sample's tokens are cut."""

    chunk_length: int
    chunks: int


class Blocks(NamedTuple):
    """How channels are cut: a tile's shape, see `triton_tile`, groups and their channels."""

    NR: int
    ER: int
    NL: int
    EL: int
    groups: int
    group_channels: int

    @property
    def group_blocks(self) -> int:
        """Blocks of channels in a group."""
        return -(-self.group_channels // (self.ER * self.EL))

    @property
    def whole(self) -> bool:
        """Whether every block has all its channels."""
        return self.group_channels % (self.ER * self.EL) == 0

    def constants(self, registers: int | None) -> dict[str, Any]:
        """Compile-time arguments and launch of the kernels that have such a tile."""
        tile = {"NR": self.NR, "ER": self.ER, "NL": self.NL, "EL": self.EL}
        return {"G": self.groups, "N": self.NR * self.NL, **tile, "num_warps": 1, "maxnreg": registers}


def cut_channels(A: Tensor, groups: int, numbers: int) -> Blocks:
    """Tiles of about `numbers` a lane; no more channels than a group has."""
    channels, size = A.shape
    n_lanes = min(size, 4)
    e_lanes, n_rows = WARP // n_lanes, size // n_lanes
    e_rows = min(max(1, numbers // n_rows), next_power_of_two(-(-channels // (groups * e_lanes))))
    return Blocks(n_rows, e_rows, n_lanes, e_lanes, groups, channels // groups)


def cut_tokens(x: Tensor, rows: Rows, programs: int) -> Chunks:
    """Chunks that keep the GPU busy; `programs`: that a chunk has in each sample."""
    programs, processors = rows.samples * programs, multiprocessors(x)
    wanted = 1 if programs >= TUNING.alone * processors else -(-TUNING.programs * processors // programs)
    chunk_length = max(TUNING.least_chunk, -(-rows.length // (wanted * TUNING.span)) * TUNING.span)
    if wanted == 1 or chunk_length >= rows.length:
        return Chunks(rows.length, 1)
    return Chunks(chunk_length, -(-rows.length // chunk_length))


def forward(
    rows: Rows, training: bool, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the forward kernels. All tensors are contiguous.

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
    blocks = cut_channels(A, B.shape[-2], TUNING.forward_numbers)
    chunks = cut_tokens(x, rows, blocks.groups * blocks.group_blocks)
    before = first
    if chunks.chunks > 1:
        before = _joined_chunks(triton_forward.find_chunk_ends, rows, chunks, x, dt, A, B, first, reverse=False)
    spans = -(-rows.length // TUNING.span) if training else 0
    y, last, kept = torch.empty_like(x), torch.empty_like(first), A.new_empty(rows.samples, spans, *A.shape)
    with on_device(x):
        triton_forward.walk_forward[_programs(rows, chunks, blocks),](
            x, dt, A, B, C, D, before, y, kept, last, *_numbers(rows, chunks, blocks),
            WHOLE=blocks.whole, SPAN=TUNING.span, KEEP=training, **blocks.constants(TUNING.forward_registers),
        )  # fmt: skip
    return y, last, kept


def _programs(rows: Rows, chunks: Chunks, blocks: Blocks) -> int:
    return rows.samples * chunks.chunks * blocks.groups * blocks.group_blocks


def _numbers(rows: Rows, chunks: Chunks, blocks: Blocks) -> tuple[int, ...]:
    """What the kernels with a block a program are told, from `length` to `unit`."""
    cuts = (*chunks, blocks.group_blocks, blocks.group_channels)
    return (rows.length, *cuts, rows.sample_stride, rows.time_stride, 1)


def _joined_chunks(
    find: Any, rows: Rows, chunks: Chunks, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, first: Tensor, *, reverse: bool
) -> Tensor:
    """The state, or in reverse the adjoint, that each chunk begins with, fp32 [samples, chunks, c, n].

    `find` is the kernel for what a chunk ends with if it begins with zeros: x and B are what it takes for them.
    """
    blocks = cut_channels(A, B.shape[-2], TUNING.forward_numbers)
    ends = A.new_empty(rows.samples, chunks.chunks, *A.shape)
    spent = A.new_empty(ends.shape[:3])
    with on_device(x):
        find[_programs(rows, chunks, blocks),](
            x, dt, A, B, ends, spent, *_numbers(rows, chunks, blocks),
            WHOLE=blocks.whole, **blocks.constants(TUNING.forward_registers),
        )  # fmt: skip
        triton_forward.join_chunks[rows.samples, -(-A.numel() // JOIN_BLOCK)](
            ends, spent, A, first, chunks.chunks, A.shape[0],
            N=A.shape[1], REVERSED=reverse, BLOCK=JOIN_BLOCK, AHEAD=JOIN_AHEAD, num_warps=1,
        )  # fmt: skip
    return ends


def backward(
    rows: Rows, dy: Tensor, dlast: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    kept: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients (dx, ddt, dA, dB, dC, dD, dfirst) for those of y and last; dx in x's dtype, all others in fp32.

    Arguments as in `forward`, all contiguous.
    """
    blocks = cut_channels(A, B.shape[-2], TUNING.backward_numbers)
    step = max(1, TUNING.step // -(-blocks.NR * blocks.ER // TUNING.backward_numbers))
    part_blocks = -(-blocks.group_blocks // max(1, TUNING.parts // blocks.groups))
    parts = -(-blocks.group_blocks // part_blocks)
    chunks = cut_tokens(x, rows, blocks.groups * parts)
    after = dlast
    if chunks.chunks > 1:
        after = _joined_chunks(triton_backward.find_chunk_starts, rows, chunks, dy, dt, A, C, dlast, reverse=True)
    num_chunks, num_rows = rows.samples * chunks.chunks, rows.samples * rows.length
    dx, ddt, dfirst = torch.empty_like(x), torch.empty_like(dt), torch.empty_like(dlast)
    dA, dD = A.new_empty(num_chunks, *A.shape), A.new_empty(num_chunks, A.shape[0])
    dB, dC = (A.new_empty(parts, *B.shape) for _ in "BC")
    with on_device(x):
        triton_backward.walk_backward[num_chunks * blocks.groups * parts,](
            dy, x, dt, A, B, C, D, kept, after, dx, ddt, dA, dB, dC, dD, dfirst, rows.length, num_rows, *chunks,
            parts, part_blocks, blocks.group_blocks, blocks.group_channels, rows.sample_stride, rows.time_stride, 1,
            WHOLE=blocks.whole and rows.length % step == 0, SPAN=TUNING.span, STEP=step,
            **blocks.constants(TUNING.backward_registers),
        )  # fmt: skip
    return dx, ddt, *(y.sum(0) for y in (dA, dB, dC, dD)), dfirst
