"""Autograd function of the selective scan's Triton implementation. Triton is imported only when it is called."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.common.rows import Rows


def selective_scan_triton(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` with Triton. The caller has checked that the kernels support the arguments.

    Returns:
        y: [b, t, c] in x's dtype.
        state: state after the last token, fp32 [b, c, n].
    """
    if B.dim() == 3:
        B, C = B[:, :, None], C[:, :, None]
    D = A.new_zeros(x.shape[2]) if D is None else D.float().contiguous()
    if initial_state is None:
        initial_state = A.new_zeros(x.shape[0], *A.shape)
    rows = Rows.from_tensor(x)
    training = torch.is_grad_enabled()
    x, dt, B, C = (rows.to_rows(y) for y in (x, dt, B, C))
    y, state = _Scan.apply(rows, training, x, dt, A.contiguous(), B, C, D, initial_state.float().contiguous())
    return rows.reorder(y), state


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, training: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        from kernels.selective_scan import triton_launch

        *scanned, _ = inputs
        y, last, saved_states = triton_launch.forward(rows, training and any(ctx.needs_input_grad), *inputs)
        ctx.save_for_backward(*scanned, saved_states)
        ctx.rows = rows
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.selective_scan import triton_launch

        dy, dlast = (y.contiguous() for y in gradients)
        saved = ctx.saved_tensors  # activation checkpointing allows reading them only once
        found = triton_launch.backward(ctx.rows, dy, dlast, *saved)
        dtypes = [y.dtype for y in (*saved[:-1], dlast)]
        return None, None, *(y.to(dtype) for y, dtype in zip(found, dtypes, strict=True))
