"""Autograd function of the gated delta rule's Triton implementation. Triton is imported only when it is called."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gated_delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `gated_delta_rule` with Triton. The caller has checked that the kernels support the arguments.

    Returns:
        o: [b, t, h, dv] in v's dtype.
        state: state after the last token, fp32 [b, h, dk, dv].
    """
    samples, _, heads, key = q.shape
    if initial_state is None:
        initial_state = q.new_zeros(samples, heads, key, v.shape[3], dtype=torch.float32)
    g = None if g is None else g.float().contiguous()
    initial_state = initial_state.float().contiguous()
    return _DeltaRule.apply(
        scale, q.contiguous(), k.contiguous(), v.contiguous(), g, beta.float().contiguous(), initial_state
    )


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, scale: float, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial_state: Tensor
    ) -> tuple[Tensor, Tensor]:
        from kernels.gated_delta_rule import triton_launch

        samples, length, heads, key = q.shape
        ctx.problem = triton_launch.Problem(samples, length, heads, key, v.shape[3], g is not None, scale)
        solved = triton_launch.solve(ctx.problem, k, beta, g)
        scanned = triton_launch.scan(ctx.problem, k, v, beta, solved, initial_state)
        # States and updates are recomputed in the backward pass: they take as much memory as four of the inputs.
        ctx.save_for_backward(q, k, v, beta, *solved, initial_state)
        return triton_launch.compute_output(ctx.problem, q, k, solved, scanned), scanned.final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dfinal_state: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.gated_delta_rule import triton_launch

        q, k, v, beta, *solved_tensors, initial_state = ctx.saved_tensors
        solved = triton_launch.SolvedChunks(*solved_tensors)
        dout, dfinal_state = dout.contiguous(), dfinal_state.contiguous()
        return None, *triton_launch.backward(ctx.problem, dout, dfinal_state, q, k, v, beta, solved, initial_state)
