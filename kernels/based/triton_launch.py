"""The order of Based's Triton kernels, their sizes and their buffers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.based import triton_backward, triton_forward
from kernels.based.features import num_features
from kernels.rows import Rows
from kernels.triton_math import on_device, tile


class Tuning(NamedTuple):
    """What may be chosen freely for a kernel.

    Attributes:
        tile: tokens that a program has at a time; divides CHUNK.
        num_warps: 2, as Hopper's own matrix instructions take 4: see `triton_forward`.
        num_stages: see Triton.
    """

    tile: int
    num_warps: int
    num_stages: int


SUM = Tuning(tile=32, num_warps=2, num_stages=3)
READ = Tuning(tile=64, num_warps=2, num_stages=1)
WRITE_QUERIES = Tuning(tile=32, num_warps=2, num_stages=3)
WRITE_KEYS = Tuning(tile=32, num_warps=2, num_stages=3)
"""Replace any to measure others."""

CHUNK = 256
"""Tokens between two states, each of which is as large as 300 tokens of 16 and 128 numbers in 16 bits."""

SUM_ROWS, SUM_ROWS_OF_NARROW, NARROW = 64, 32, 64
"""Rows of a state that a program of `sum_chunks` has: they, or fewer for values of up to NARROW."""

ACCUMULATE_BLOCK, FALLS = 512, 32
"""Numbers of a state that a program of `accumulate_chunks` has, and tokens of one of `find_falls`."""


class Problem(NamedTuple):
    """Sizes of a call."""

    rows: Rows
    heads: int
    width: int
    value: int

    @property
    def places(self) -> int:
        """Heads of all samples."""
        return self.rows.samples * self.heads

    @property
    def features(self) -> int:
        """Rows of a state."""
        return num_features(self.width)

    @property
    def chunks(self) -> int:
        """Of a sample."""
        return -(-self.rows.length // CHUNK)

    def tiles(self, tuning: Tuning) -> tuple[int, int]:
        """Programs of a kernel that writes what tokens have."""
        return -(-self.rows.length // tuning.tile), self.places

    @property
    def numbers(self) -> tuple[int, int, float, int, int]:
        """What kernels are given behind their tensors: s is a product of queries and keys times the third."""
        return self.rows.length, self.chunks, self.width**-0.25, self.rows.sample_stride, self.rows.time_stride

    def launch(self, tuning: Tuning, **more: Any) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {
            "H": self.heads, "W": self.width, "E": self.value, "F": self.features,
            "BLOCK_W": tile(self.width), "BLOCK_E": tile(self.value), "C": CHUNK, "T": tuning.tile,
            "num_warps": tuning.num_warps, "num_stages": tuning.num_stages, **more,
        }  # fmt: skip


def forward(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output, laid as v, and the sums of weights.

    Args:
        problem: sizes.
        q, k: contiguous rows [..., h, f].
        v: contiguous rows [..., h, e].

    Returns:
        out: as v.
        sums: fp32 [..., h].
    """
    out, sums = torch.empty_like(v), torch.empty(v.shape[:-1], dtype=torch.float32, device=v.device)
    with on_device(q):
        states = _states(problem, k, v, None)
        triton_forward.read_chunks[problem.tiles(READ)](
            q, k, v, states, out, sums, *problem.numbers, **problem.launch(READ)
        )
    return out, sums


def backward(
    problem: Problem, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; arguments as in `forward`, what it gave, and the output's gradient."""
    dq, dk, dv, falls = (torch.empty_like(x) for x in (q, k, v, sums))
    with on_device(q):
        triton_backward.find_falls[-(-sums.numel() // FALLS),](
            dout, out, falls, sums.numel(), E=problem.value, BLOCK_E=tile(problem.value), T=FALLS
        )
        states = _states(problem, k, v, None)
        triton_backward.write_query_gradients[problem.tiles(WRITE_QUERIES)](
            dout, q, k, v, sums, falls, states, dq, *problem.numbers, **problem.launch(WRITE_QUERIES)
        )
        del states  # before the others, which are as large
        states = _states(problem, q, dout, (sums, falls))
        triton_backward.write_key_value_gradients[problem.tiles(WRITE_KEYS)](
            dout, q, k, v, sums, falls, states, dk, dv, *problem.numbers, **problem.launch(WRITE_KEYS)
        )
    return dq, dk, dv


def _states(problem: Problem, x: Tensor, y: Tensor, weights: tuple[Tensor, Tensor] | None) -> Tensor:
    """Sums over the chunks before each; with sums of weights and falls, over those behind each."""
    size = problem.features * (problem.value + 1)
    states = torch.empty(problem.places, problem.chunks, size, dtype=torch.float32, device=x.device)
    sums, falls = (states, states) if weights is None else weights
    lefts = max(1, (SUM_ROWS if problem.value > NARROW else SUM_ROWS_OF_NARROW) // tile(problem.width))
    triton_forward.sum_chunks[-(-(problem.width + 2) // lefts), problem.chunks, problem.places](
        x, y, sums, falls, states, *problem.numbers,
        **problem.launch(SUM, LEFTS=lefts, GRADIENT=weights is not None),
    )  # fmt: skip
    triton_forward.accumulate_chunks[-(-size // ACCUMULATE_BLOCK), problem.places](
        states, problem.chunks, SIZE=size, BLOCK=ACCUMULATE_BLOCK, REVERSE=weights is not None
    )
    return states
