"""Autograd function of Based's Triton implementation. Triton is imported only when it is called."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.rows import Rows


def based_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute `based` with Triton. The caller has checked that the kernels support the arguments.

    Returns:
        o: [b, t, h, e] in v's dtype.
    """
    rows = Rows.from_tensor(v)
    out: Tensor = _Based.apply(rows, *(rows.to_rows(x) for x in (q, k, v)))
    return rows.reorder(out)


class _Based(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from kernels.based import triton_launch

        ctx.problem = triton_launch.Problem(rows, q.shape[2], q.shape[3], v.shape[3])
        out, sums = triton_launch.forward(ctx.problem, q, k, v)
        # The states are recomputed in the backward pass: they would take more memory than the values.
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.based import triton_launch

        return None, *triton_launch.backward(ctx.problem, dout.contiguous(), *ctx.saved_tensors)
