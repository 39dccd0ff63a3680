"""Public interface of the selective scan: argument checks and choice of an implementation."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from kernels.common.attention_math import compute_dtype
from kernels.common.dispatch import (
    check_any_floating,
    choose_triton_or_reference,
    full_precision,
    triton_unsupported_reason,
)
from kernels.selective_scan.op import selective_scan_triton
from kernels.selective_scan.reference import chunked, recurrent

Implementation = Literal["auto", "recurrent", "chunked", "triton"]
_PLAIN = {"chunked": chunked, "recurrent": recurrent}

MAX_TRITON_STATE = 64
"""State size per channel for the Triton implementation; a larger state would not fit in a warp's registers."""


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Selective scan: h <- exp(dt_t A) h + dt_t B_t x_t;  y_t = C_t . h + D x_t, with a diagonal state per channel.

    Computed in fp32 (float64 for float64). Channel i uses B and C of group i // (c // g).

    Args:
        x: channels [b, t, c]; fp32, bf16, fp16 or float64.
        dt: step sizes [b, t, c], finite and not negative, in fp32 or float64, because 16-bit formats round long decays.
        A: decay rates [c, n], at most 0, in fp32 or float64.
        B: input projection [b, t, n], or per group [b, t, g, n] with c a multiple of g; any floating dtype.
        C: output projection of B's shape; any floating dtype.
        D: skip connection [c], any floating dtype; None for none.
        initial_state: state before the first token [b, c, n], any floating dtype; None for zeros.
        output_final_state: True to return the state after the last token.
        implementation: "recurrent" or "chunked" in plain torch; "triton" for n a power of two up to 64 and fp32 dt and
            A; "auto" for Triton on a GPU where it is supported, else chunked.

    Returns:
        y: output [b, t, c] in x's dtype.
        state: state after the last token [b, c, n] in fp32 (float64 for float64), or None without `output_final_state`.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Gu, Dao 2023, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (arXiv 2312.00752).
    """
    _check(x, dt, A, B, C, D, initial_state)
    unsupported_reason = _unsupported_reason(x, dt, A, B, C)
    chosen = choose_triton_or_reference("selective_scan", implementation, x, unsupported_reason, tuple(_PLAIN))
    if chosen.name == "triton":
        y, state = selective_scan_triton(x, dt, A, B, C, D, initial_state)
    else:
        y, state = _run_plain(_PLAIN[chosen.name], x, dt, A, B, C, D, initial_state)
    return y, state if output_final_state else None


def _run_plain(
    function: Callable[..., tuple[Tensor, Tensor]],
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    dtype, groups = compute_dtype(x), B.shape[2] if B.dim() == 4 else 1
    if initial_state is None:
        initial_state = torch.zeros(x.shape[0], *A.shape, dtype=dtype, device=x.device)
    with full_precision(x):
        x_btge, dt_btge = (y.to(dtype).unflatten(2, (groups, -1)) for y in (x, dt))
        B_btgn, C_btgn = ((y if y.dim() == 4 else y[:, :, None]).to(dtype) for y in (B, C))
        A_gen, state_bgen = A.to(dtype).unflatten(0, (groups, -1)), initial_state.to(dtype).unflatten(1, (groups, -1))
        y_btge, state_bgen = function(x_btge, dt_btge, A_gen, B_btgn, C_btgn, state_bgen=state_bgen)
        y = y_btge.flatten(2)
        if D is not None:
            y = y + D.to(dtype) * x.to(dtype)
    return y.to(x.dtype), state_bgen.flatten(1, 2)


def _unsupported_reason(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> str | None:
    unsupported_reason = triton_unsupported_reason(x=x, B=B, C=C)
    if unsupported_reason is not None:
        return unsupported_reason
    for name, tensor in (("dt", dt), ("A", A)):
        if tensor.dtype != torch.float32:
            return f"{name} has dtype {tensor.dtype}: convert it to torch.float32"
    size = A.shape[1]
    if size > MAX_TRITON_STATE or size & (size - 1):
        return f"A has state size {size}: give a power of two up to {MAX_TRITON_STATE}"
    return None


def _check(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor | None, initial_state: Tensor | None
) -> None:
    for name, tensor, dims in (("x", x, "[batch, length, channels]"), ("A", A, "[channels, state size]")):
        if tensor.dim() != dims.count(",") + 1 or tensor.numel() == 0:
            raise ValueError(f"{name} has shape {list(tensor.shape)}: give {dims}, all at least 1")
    (batch, length, channels), size = x.shape, A.shape[1]
    groups = [B.shape[2]] if B.dim() == 4 else []
    if groups and (groups[0] == 0 or channels % groups[0]):
        raise ValueError(f"B has {groups[0]} groups: give a number that divides the {channels} channels of x")
    inner = (batch, length, *groups, size)
    expected = {"dt": (dt, x.shape), "A": (A, (channels, size)), "B": (B, inner), "C": (C, inner)}
    if D is not None:
        expected["D"] = (D, (channels,))
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (batch, channels, size))
    for name, (tensor, shape) in {"x": (x, x.shape), **expected}.items():
        _check_tensor(name, tensor, shape, x)
    for name, tensor in (("dt", dt), ("A", A)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{name} has dtype {tensor.dtype}: convert it to torch.float32, as it determines the decay"
            )


def _check_tensor(name: str, tensor: Tensor, shape: Sequence[int], x: Tensor) -> None:
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}: give {list(shape)}, to match x and A")
    if tensor.device != x.device:
        raise ValueError(f"{name} is on {tensor.device} but x is on {x.device}: move one of them")
    check_any_floating(**{name: tensor})
