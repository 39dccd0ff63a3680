"""Launch sequence, tile sizes and buffers of the gated delta rule's Triton kernels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.common.triton_math import multiprocessors, on_device, tile
from kernels.gated_delta_rule import triton_backward, triton_forward
from kernels.gated_delta_rule.triton_tile import CHUNK

WIDE, FEW_WARPS = 64, 2
"""Except in the scans, a kernel with a tile narrower than WIDE columns runs with at most FEW_WARPS warps. The module
docstring of `triton_forward` gives the reason.
"""


class Tuning(NamedTuple):
    """Tunable launch parameters of a kernel.

    Attributes:
        num_warps, num_stages: launch options of Triton.
        block: maximum columns per program. These are value columns, but key columns for `write_gradients`, and the
            columns of its factors for `multiply_pairs`. For the scans it must be below WIDE. None: all columns.
        inner: maximum value columns that `write_gradients` loads at a time.
    """

    num_warps: int
    num_stages: int
    block: int | None = None
    inner: int = 64


# Module attributes, so that a benchmark can assign other values.
SOLVE = Tuning(num_warps=1, num_stages=1)
MULTIPLY = Tuning(num_warps=2, num_stages=2, block=64)
READ = Tuning(num_warps=4, num_stages=2, block=128)
SCAN = Tuning(num_warps=4, num_stages=2, block=32)
SCAN_FEW_PROGRAMS = Tuning(num_warps=4, num_stages=3, block=16)
"""Parameters of the scans if SCAN gives fewer programs than the GPU has multiprocessors."""
WRITE_GRADIENTS = Tuning(num_warps=4, num_stages=2, block=64)


class Problem(NamedTuple):
    """Sizes and options of one call."""

    samples: int
    length: int
    heads: int
    key_dim: int
    value_dim: int
    decays: bool
    scale: float

    @property
    def chunks(self) -> int:
        """Number of chunks per sample."""
        return -(-self.length // CHUNK)

    @property
    def num_sequences(self) -> int:
        """Number of (sample, head) pairs."""
        return self.samples * self.heads

    def launch_arguments(self, tuning: Tuning, **constants: int) -> dict[str, Any]:
        """Return the compile-time arguments and launch options common to all kernels, with `constants` added."""
        return {
            "H": self.heads, "C": CHUNK, "DECAYS": self.decays,
            "num_warps": tuning.num_warps, "num_stages": tuning.num_stages, **constants,
        }  # fmt: skip

    def value_block_constants(self, tuning: Tuning) -> dict[str, Any]:
        """Return the constants of a kernel with all key columns and a block of value columns per program."""
        blocks = {"BLOCK_D": tile(self.key_dim), "BLOCK_E": tile(self.value_dim, tuning.block)}
        return self.launch_arguments(tuning, D=self.key_dim, E=self.value_dim, **blocks)

    def scan_constants(self, x: Tensor) -> dict[str, Any]:
        """Return the constants of the scans, in which a program iterates over all chunks of a sample."""
        wide = self.value_block_constants(SCAN)
        programs = self.num_sequences * -(-self.value_dim // wide["BLOCK_E"])
        return wide if programs >= multiprocessors(x) else self.value_block_constants(SCAN_FEW_PROGRAMS)

    def key_block_constants(self, tuning: Tuning) -> dict[str, Any]:
        """Return the constants of a kernel with a block of key columns per program that iterates over value columns."""
        blocks = {"BLOCK_D": tile(self.key_dim, tuning.block), "BLOCK_E": tile(self.value_dim, tuning.inner)}
        return self.launch_arguments(tuning, D=self.key_dim, E=self.value_dim, **blocks)


def limit_warps(constants: dict[str, Any]) -> dict[str, Any]:
    """Return a kernel's constants, limited to FEW_WARPS if one of its tiles is narrower than WIDE."""
    if min(constants[name] for name in ("BLOCK_D", "BLOCK_E") if name in constants) >= WIDE:
        return constants
    return {**constants, "num_warps": min(constants["num_warps"], FEW_WARPS)}


class SolvedChunks(NamedTuple):
    """Outputs of `solve`, passed to the other kernels.

    Attributes:
        inverses: argument `inverses` of `triton_forward.solve_chunks`, [b * h, chunks, CHUNK, CHUNK].
        log_decays: argument `log_decays` of the same kernel, fp32 [b, t, h]. Without decays it is `beta`, which no
            kernel reads then.
    """

    inverses: Tensor
    log_decays: Tensor


def solve(problem: Problem, k: Tensor, beta: Tensor, g: Tensor | None) -> SolvedChunks:
    """Invert the triangular system of each chunk.

    Args:
        problem: sizes.
        k: contiguous [b, t, h, dk].
        beta: contiguous fp32 [b, t, h].
        g: contiguous fp32 [b, t, h]; None without decays.
    """
    inverses = k.new_empty(problem.num_sequences, problem.chunks, CHUNK, CHUNK)
    log_decays = beta if g is None else torch.empty_like(beta)
    with on_device(k):
        triton_forward.solve_chunks[problem.num_sequences * problem.chunks,](
            k, beta, beta if g is None else g, inverses, log_decays, problem.length, problem.chunks,
            **problem.launch_arguments(SOLVE, D=problem.key_dim, BLOCK_D=tile(problem.key_dim)),
        )  # fmt: skip
    return SolvedChunks(inverses, log_decays)


def pair_products(
    problem: Problem, x: Tensor, y: Tensor, solved: SolvedChunks, *, scale: float = 1.0, strict: bool = False
) -> Tensor:
    """Compute products of token pairs with `triton_forward.multiply_pairs`.

    Args:
        problem: sizes.
        x, y: contiguous [b, t, h, d].
        solved: output of `solve`; its `log_decays` are used.
        scale: factor on the products.
        strict: write 0 for the product of a token with itself.
    """
    out = torch.empty_like(solved.inverses)
    width = x.shape[3]
    constants = problem.launch_arguments(MULTIPLY, D=width, BLOCK_D=tile(width, MULTIPLY.block), STRICT=strict)
    with on_device(x):
        triton_forward.multiply_pairs[problem.num_sequences * problem.chunks,](
            x, y, out, solved.log_decays, problem.length, problem.chunks, scale, **limit_warps(constants)
        )
    return out


class Scanned(NamedTuple):
    """Outputs of `scan`; `triton_forward.scan_chunks` describes them."""

    states: Tensor
    updates: Tensor
    final_state: Tensor


def scan(problem: Problem, k: Tensor, v: Tensor, beta: Tensor, solved: SolvedChunks, initial_state: Tensor) -> Scanned:
    """Compute the state before each chunk, all updates and the final state.

    Args:
        problem: sizes.
        k: contiguous [b, t, h, dk].
        v: contiguous [b, t, h, dv].
        beta: contiguous fp32 [b, t, h].
        solved: output of `solve`.
        initial_state: contiguous fp32 [b, h, dk, dv], the state before the first token.
    """
    states = k.new_empty(problem.num_sequences, problem.chunks, problem.key_dim, problem.value_dim)
    scanned = Scanned(states, torch.empty_like(v), torch.empty_like(initial_state))
    constants = problem.scan_constants(k)
    with on_device(k):
        triton_forward.scan_chunks[-(-problem.value_dim // constants["BLOCK_E"]), problem.num_sequences](
            k,
            v,
            beta,
            solved.log_decays,
            solved.inverses,
            initial_state,
            *scanned,
            problem.length,
            problem.chunks,
            **constants,
        )
    return scanned


def compute_output(problem: Problem, q: Tensor, k: Tensor, solved: SolvedChunks, scanned: Scanned) -> Tensor:
    """Return the output [b, t, h, dv]."""
    out, pairs = torch.empty_like(scanned.updates), pair_products(problem, q, k, solved)
    constants = limit_warps(problem.value_block_constants(READ))
    with on_device(k):
        blocks = -(-problem.value_dim // constants["BLOCK_E"])
        triton_forward.read_states[problem.num_sequences * problem.chunks, blocks](
            q, solved.log_decays, pairs, scanned.states, scanned.updates, out,
            problem.length, problem.chunks, problem.scale, **constants,
        )  # fmt: skip
    return out


class Gradients(NamedTuple):
    """Gradients of the inputs; those of beta, g and the initial state are in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    initial_state: Tensor


def backward(
    problem: Problem, dout: Tensor, dfinal_state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor,
    solved: SolvedChunks, initial_state: Tensor,
) -> Gradients:  # fmt: skip
    """Return the gradients of the inputs, given those of the output and of the final state.

    Other arguments as in `scan`; q is like k.
    """
    states, updates, _ = scan(problem, k, v, beta, solved, initial_state)
    pairs = pair_products(problem, q, k, solved)
    dstates, dv, dinitial_state = torch.empty_like(states), torch.empty_like(v), torch.empty_like(initial_state)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    values, keys = problem.scan_constants(k), limit_warps(problem.key_block_constants(WRITE_GRADIENTS))
    blocks, key_blocks = -(-problem.value_dim // values["BLOCK_E"]), -(-problem.key_dim // keys["BLOCK_D"])
    dbeta = beta.new_empty(blocks, *beta.shape)
    dg = beta.new_empty(key_blocks, *beta.shape) if problem.decays else dbeta
    with on_device(k):
        triton_backward.scan_chunks_back[blocks, problem.num_sequences](
            dout, dfinal_state, q, k, beta, solved.log_decays, solved.inverses, pairs, updates, dstates, dv, dbeta,
            dinitial_state, problem.length, problem.chunks, problem.scale, **values,
        )  # fmt: skip
        # Products of do and u, and of dv and u: the gradients of the scores and of the triangular system.
        ds = pair_products(problem, dout, updates, solved, scale=problem.scale)
        dm = pair_products(problem, dv, updates, solved, strict=True)
        triton_backward.write_gradients[problem.num_sequences * problem.chunks, key_blocks](
            dout, q, k, solved.log_decays, ds, dm, states, dstates, updates, dv, dq, dk, dg,
            problem.length, problem.chunks, problem.scale, **keys,
        )  # fmt: skip
    return Gradients(dq, dk, dv, dg.sum(0) if problem.decays else None, dbeta.sum(0), dinitial_state)
