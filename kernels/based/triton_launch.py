"""Launch sequence, tile sizes and buffers of Based's Triton kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.based import triton_backward, triton_forward
from kernels.based.features import num_features
from kernels.common.rows import Rows
from kernels.common.triton_math import on_device, tile


class Tuning(NamedTuple):
    """Tunable launch parameters of a kernel.

    Attributes:
        tile: tokens per tile; divides CHUNK.
        num_warps: 2, to avoid Hopper's wgmma, which needs 4: see `triton_forward`.
        num_stages: pipeline stages of Triton.
    """

    tile: int
    num_warps: int
    num_stages: int


SUM = Tuning(tile=32, num_warps=2, num_stages=3)
READ = Tuning(tile=64, num_warps=2, num_stages=1)
WRITE_QUERIES = Tuning(tile=32, num_warps=2, num_stages=3)
WRITE_KEYS = Tuning(tile=32, num_warps=2, num_stages=3)
"""Parameters in use. A benchmark may assign others."""

CHUNK = 256
"""Tokens between two states. With f = 16, e = 128, one state takes the memory of 300 tokens in 16 bits."""

SUM_ROWS, SUM_ROWS_OF_NARROW, NARROW = 64, 32, 64
"""State rows per program of `sum_chunks`; fewer for values up to NARROW wide."""

ACCUMULATE_BLOCK, NEG_DELTA_TOKENS = 512, 32
"""State elements per program of `accumulate_chunks`, and tokens per program of `write_neg_deltas`."""


class Problem(NamedTuple):
    """Sizes of one call."""

    rows: Rows
    heads: int
    width: int
    value: int

    @property
    def num_sequences(self) -> int:
        """Number of (sample, head) pairs."""
        return self.rows.samples * self.heads

    @property
    def features(self) -> int:
        """Number of features, the rows of a state."""
        return num_features(self.width)

    @property
    def chunks(self) -> int:
        """Number of chunks per sample."""
        return -(-self.rows.length // CHUNK)

    def tiles(self, tuning: Tuning) -> tuple[int, int]:
        """Return the grid of a kernel that writes one tile of tokens per program."""
        return -(-self.rows.length // tuning.tile), self.num_sequences

    @property
    def scalar_arguments(self) -> tuple[int, int, float, int, int]:
        """Scalar arguments of the kernels. The third is the factor on q and on k, so that their product is s."""
        return self.rows.length, self.chunks, self.width**-0.25, self.rows.sample_stride, self.rows.time_stride

    def launch(self, tuning: Tuning, **constants: Any) -> dict[str, Any]:
        """Return the compile-time arguments and launch options of a kernel."""
        return {
            "H": self.heads, "W": self.width, "E": self.value, "F": self.features,
            "BLOCK_W": tile(self.width), "BLOCK_E": tile(self.value), "C": CHUNK, "T": tuning.tile,
            "num_warps": tuning.num_warps, "num_stages": tuning.num_stages, **constants,
        }  # fmt: skip


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the output and the sums of weights.

    Args:
        problem: sizes.
        q, k: contiguous rows [..., h, f].
        v: contiguous rows [..., h, e].

    Returns:
        out: shape, dtype and layout of v.
        sums: fp32 [..., h].
    """
    out, sums = torch.empty_like(v), torch.empty(v.shape[:-1], dtype=torch.float32, device=v.device)
    with on_device(q):
        states = _states(problem, k, v, None)
        triton_forward.read_chunks[problem.tiles(READ)](
            q, k, v, states, out, sums, *problem.scalar_arguments, **problem.launch(READ)
        )
    return out, sums


def backward(
    problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, from the output's gradient and the inputs and outputs of `forward`."""
    dq, dk, dv, neg_deltas = (torch.empty_like(x) for x in (q, k, v, sums))
    with on_device(q):
        triton_backward.write_neg_deltas[-(-sums.numel() // NEG_DELTA_TOKENS),](
            dout, out, neg_deltas, sums.numel(), E=problem.value, BLOCK_E=tile(problem.value), T=NEG_DELTA_TOKENS
        )
        states = _states(problem, k, v, None)
        triton_backward.write_query_gradients[problem.tiles(WRITE_QUERIES)](
            dout, q, k, v, sums, neg_deltas, states, dq, *problem.scalar_arguments, **problem.launch(WRITE_QUERIES)
        )
        del states  # free them before the reverse states, which are as large, are allocated
        states = _states(problem, q, dout, (sums, neg_deltas))
        triton_backward.write_key_value_gradients[problem.tiles(WRITE_KEYS)](
            dout, q, k, v, sums, neg_deltas, states, dk, dv, *problem.scalar_arguments, **problem.launch(WRITE_KEYS)
        )
    return dq, dk, dv


def _states(problem: Problem, x: Tensor, y: Tensor, weights: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the state before each chunk; with `weights` (sums, falls), the reverse state of the chunks after it."""
    size = problem.features * (problem.value + 1)
    states = torch.empty(problem.num_sequences, problem.chunks, size, dtype=torch.float32, device=x.device)
    sums, neg_deltas = (states, states) if weights is None else weights
    lefts_per_program = max(1, (SUM_ROWS if problem.value > NARROW else SUM_ROWS_OF_NARROW) // tile(problem.width))
    triton_forward.sum_chunks[-(-(problem.width + 2) // lefts_per_program), problem.chunks, problem.num_sequences](
        x, y, sums, neg_deltas, states, *problem.scalar_arguments,
        **problem.launch(SUM, LEFTS=lefts_per_program, GRADIENT=weights is not None),
    )  # fmt: skip
    triton_forward.accumulate_chunks[-(-size // ACCUMULATE_BLOCK), problem.num_sequences](
        states, problem.chunks, SIZE=size, BLOCK=ACCUMULATE_BLOCK, REVERSE=weights is not None
    )
    return states
