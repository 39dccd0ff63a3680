"""The selective scan's Triton form as a function of autograd. Importing this needs no Triton; calling does."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def selective_scan_triton(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Arguments as in `selective_scan`, checked there, and without an obstacle.

    Returns:
        y: [b, t, c] in x's dtype.
        state: after the last token, fp32 [b, c, n].
    """
    from kernels.selective_scan.triton_launch import Rows

    samples, length, channels = x.shape
    if B.dim() == 3:
        B, C = B[:, :, None], C[:, :, None]
    D = A.new_zeros(channels) if D is None else D.float().contiguous()
    if initial_state is None:
        initial_state = A.new_zeros(samples, *A.shape)
    # The order of the tokens is the caller's: turning them around would cost a pass.
    time_major = x.stride(0) < x.stride(1)
    tokens = [(y.transpose(0, 1) if time_major else y).contiguous() for y in (x, dt, B, C)]
    rows = Rows(samples, length, *((1, samples) if time_major else (length, 1)))
    training = torch.is_grad_enabled()
    x, dt, B, C = tokens
    y, state = _Scan.apply(rows, training, x, dt, A.contiguous(), B, C, D, initial_state.float().contiguous())
    return (y.transpose(0, 1) if time_major else y), state


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, training: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        from kernels.selective_scan import triton_launch

        *scanned, _ = inputs
        y, last, kept = triton_launch.forward(rows, training and any(ctx.needs_input_grad), *inputs)
        ctx.save_for_backward(*scanned, kept)
        ctx.rows = rows
        return y, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from kernels.selective_scan import triton_launch

        dy, dlast = (y.contiguous() for y in gradients)
        saved = ctx.saved_tensors  # under recompute they may be asked for once only
        found = triton_launch.backward(ctx.rows, dy, dlast, *saved)
        dtypes = [y.dtype for y in (*saved[:-1], dlast)]
        return None, None, *(y.to(dtype) for y, dtype in zip(found, dtypes, strict=True))
