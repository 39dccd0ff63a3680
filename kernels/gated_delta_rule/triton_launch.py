"""The order of the gated delta rule's Triton kernels, their sizes and their buffers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.gated_delta_rule import triton_backward, triton_forward
from kernels.gated_delta_rule.triton_tile import CHUNK
from kernels.triton_math import multiprocessors, on_device, tile

WIDE, FEW_WARPS = 64, 2
"""Kernels other than the walks have so few warps unless their tiles are so wide: see `triton_forward`."""


class Tuning(NamedTuple):
    """What may be chosen freely for a kernel.

    Attributes:
        num_warps, num_stages: see Triton.
        block: of values, or of keys for `multiply_pairs` and `write_gradients`, that a program has at most; below WIDE
            for the walks. None: it has all.
        inner: of values that `write_gradients` reads at a time.
    """

    num_warps: int
    num_stages: int
    block: int | None = None
    inner: int = 64


SOLVE = Tuning(num_warps=1, num_stages=1)
MULTIPLY = Tuning(num_warps=2, num_stages=2, block=64)
READ = Tuning(num_warps=4, num_stages=2, block=128)
WALK = Tuning(num_warps=4, num_stages=2, block=32)
WALK_ALONE = Tuning(num_warps=4, num_stages=3, block=16)
"""Of the walks, where the other one has fewer programs than the GPU has multiprocessors."""
WRITE_GRADIENTS = Tuning(num_warps=4, num_stages=2, block=64)
"""Replace any to measure others."""


class Problem(NamedTuple):
    """Sizes of a call."""

    samples: int
    length: int
    heads: int
    key: int
    value: int
    decays: bool
    scale: float

    @property
    def chunks(self) -> int:
        """Of a sample."""
        return -(-self.length // CHUNK)

    @property
    def places(self) -> int:
        """Heads of all samples."""
        return self.samples * self.heads

    def launch(self, tuning: Tuning, **tiles: int) -> dict[str, Any]:
        """What every kernel is compiled for, and more of it."""
        return {
            "H": self.heads, "C": CHUNK, "DECAYS": self.decays,
            "num_warps": tuning.num_warps, "num_stages": tuning.num_stages, **tiles,
        }  # fmt: skip

    def of_values(self, tuning: Tuning) -> dict[str, Any]:
        """For a kernel that has all keys and a block of values."""
        blocks = {"BLOCK_D": tile(self.key), "BLOCK_E": tile(self.value, tuning.block)}
        return self.launch(tuning, D=self.key, E=self.value, **blocks)

    def of_walk(self, x: Tensor) -> dict[str, Any]:
        """For the walks, of which each goes through a whole sequence."""
        wide = self.of_values(WALK)
        programs = self.places * -(-self.value // wide["BLOCK_E"])
        return wide if programs >= multiprocessors(x) else self.of_values(WALK_ALONE)

    def of_keys(self, tuning: Tuning) -> dict[str, Any]:
        """For a kernel that has a block of keys and goes through all values."""
        blocks = {"BLOCK_D": tile(self.key, tuning.block), "BLOCK_E": tile(self.value, tuning.inner)}
        return self.launch(tuning, D=self.key, E=self.value, **blocks)


def with_few_warps(constants: dict[str, Any]) -> dict[str, Any]:
    """A kernel's constants, with few warps if one of its tiles is not wide."""
    if min(constants[name] for name in ("BLOCK_D", "BLOCK_E") if name in constants) >= WIDE:
        return constants
    return {**constants, "num_warps": min(constants["num_warps"], FEW_WARPS)}


class Solved(NamedTuple):
    """What `solve` finds: see `triton_forward.solve_chunks`."""

    below: Tensor
    totals: Tensor


def solve(problem: Problem, k: Tensor, beta: Tensor, g: Tensor | None) -> Solved:
    """Invert the chunks' systems.

    Args:
        problem: sizes.
        k: contiguous [b, t, h, dk].
        beta: contiguous fp32 [b, t, h].
        g: likewise; None without decays.
    """
    below = k.new_empty(problem.places, problem.chunks, CHUNK, CHUNK)
    totals = beta if g is None else torch.empty_like(beta)
    with on_device(k):
        triton_forward.solve_chunks[problem.places * problem.chunks,](
            k, beta, beta if g is None else g, below, totals, problem.length, problem.chunks,
            **problem.launch(SOLVE, D=problem.key, BLOCK_D=tile(problem.key)),
        )  # fmt: skip
    return Solved(below, totals)


def multiply(
    problem: Problem, x: Tensor, y: Tensor, solved: Solved, *, scale: float = 1.0, strict: bool = False
) -> Tensor:
    """Products of pairs of tokens: see `triton_forward.multiply_pairs`.

    Args:
        problem: sizes.
        x, y: contiguous [b, t, h, d].
        solved: of `solve`, for its totals.
        scale: factor.
        strict: without those of a token with itself.
    """
    out = torch.empty_like(solved.below)
    width = x.shape[3]
    constants = problem.launch(MULTIPLY, D=width, BLOCK_D=tile(width, MULTIPLY.block), STRICT=strict)
    with on_device(x):
        triton_forward.multiply_pairs[problem.places * problem.chunks,](
            x, y, out, solved.totals, problem.length, problem.chunks, scale, **with_few_warps(constants)
        )
    return out


class Walked(NamedTuple):
    """What `walk` finds: see `triton_forward.walk_chunks`."""

    states: Tensor
    updates: Tensor
    last: Tensor


def walk(problem: Problem, k: Tensor, v: Tensor, beta: Tensor, solved: Solved, first: Tensor) -> Walked:
    """Find the state before each chunk, all updates, and the last state; arguments as in `solve`.

    Args:
        problem: sizes.
        k: keys.
        v: contiguous [b, t, h, dv].
        beta: strength.
        solved: of `solve`.
        first: contiguous fp32 [b, h, dk, dv].
    """
    states = k.new_empty(problem.places, problem.chunks, problem.key, problem.value)
    walked = Walked(states, torch.empty_like(v), torch.empty_like(first))
    constants = problem.of_walk(k)
    with on_device(k):
        triton_forward.walk_chunks[-(-problem.value // constants["BLOCK_E"]), problem.places](
            k, v, beta, solved.totals, solved.below, first, *walked, problem.length, problem.chunks, **constants
        )
    return walked


def read(problem: Problem, q: Tensor, k: Tensor, solved: Solved, walked: Walked) -> Tensor:
    """The output [b, t, h, dv]."""
    out, pairs = torch.empty_like(walked.updates), multiply(problem, q, k, solved)
    constants = with_few_warps(problem.of_values(READ))
    with on_device(k):
        triton_forward.read_states[problem.places * problem.chunks, -(-problem.value // constants["BLOCK_E"])](
            q, solved.totals, pairs, walked.states, walked.updates, out, problem.length, problem.chunks, problem.scale,
            **constants,
        )  # fmt: skip
    return out


class Gradients(NamedTuple):
    """Of the inputs; those of beta and g in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    first: Tensor


def backward(
    problem: Problem, dout: Tensor, dlast: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, solved: Solved,
    first: Tensor,
) -> Gradients:  # fmt: skip
    """Gradients of the inputs. Arguments as above, and the gradients of the output and of the last state."""
    states, updates, _ = walk(problem, k, v, beta, solved, first)
    pairs = multiply(problem, q, k, solved)
    dstates, dv, dfirst = torch.empty_like(states), torch.empty_like(v), torch.empty_like(first)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    values, keys = problem.of_walk(k), with_few_warps(problem.of_keys(WRITE_GRADIENTS))
    blocks, key_blocks = -(-problem.value // values["BLOCK_E"]), -(-problem.key // keys["BLOCK_D"])
    dbeta = beta.new_empty(blocks, *beta.shape)
    dg = beta.new_empty(key_blocks, *beta.shape) if problem.decays else dbeta
    with on_device(k):
        triton_backward.walk_chunks_back[blocks, problem.places](
            dout, dlast, q, k, beta, solved.totals, solved.below, pairs, updates, dstates, dv, dbeta, dfirst,
            problem.length, problem.chunks, problem.scale, **values,
        )  # fmt: skip
        ds = multiply(problem, dout, updates, solved, scale=problem.scale)
        dm = multiply(problem, dv, updates, solved, strict=True)
        triton_backward.write_gradients[problem.places * problem.chunks, key_blocks](
            dout, q, k, solved.totals, ds, dm, states, dstates, updates, dv, dq, dk, dg,
            problem.length, problem.chunks, problem.scale, **keys,
        )  # fmt: skip
    return Gradients(dq, dk, dv, dg.sum(0) if problem.decays else None, dbeta.sum(0), dfirst)
