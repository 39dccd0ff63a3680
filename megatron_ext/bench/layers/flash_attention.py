"""Replacement of the flash-attn functions that flash-linear-attention calls, by torch's FlashAttention-2.

Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning" (arXiv 2307.08691).
Names, arguments and layouts are flash-attn's. Sequences of q, k and v are packed, [t, h, d], and start at `cu_seqlens`.
A window is (left, right), the number of keys beside the query's own, -1 for all.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

CALLERS = {
    "fla.layers.attn": {"flash_attn_func"},
    "fla.layers.moba": {"flash_attn_func", "flash_attn_varlen_func"},
    "fla.ops.moba.parallel": {
        "flash_attn_varlen_func",
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
    },
    "fla.ops.nsa.parallel": {"flash_attn_func"},
}
"""Names that each module imports from flash-attn, or sets to None."""


def stand_in_for_flash_attn() -> bool:
    """Install these functions in fla's layers if flash-attn is not installed. Return True if they were installed."""
    if find_spec("flash_attn") is not None:
        return False
    for module, names in CALLERS.items():
        for name in names:
            setattr(import_module(module), name, globals()[name])
    return True


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """Attention over sequences of equal length: [b, t, h, d]; k and v may have fewer heads."""
    batch, length = q.shape[:2]
    starts = torch.arange(0, (batch + 1) * length, length, device=q.device, dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(q, k, v, starts, starts, length, length, causal=causal, window_size=window_size)
    return out.unflatten(0, (batch, length))


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attention over packed sequences."""
    given = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": causal,
        "window_size_left": window_size[0],
        "window_size_right": window_size[1],
    }
    out: Tensor = _Attention.apply(q, k, v, given)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> Tensor:
        out, lse, *_ = _flash_attn_varlen_forward(q=q, k=k, v=v, dropout_p=0.0, **given)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = given
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
        _flash_attn_varlen_backward(**given, dropout_p=0.0, **ctx.given)
        return dq, dk, dv, None


def _flash_attn_varlen_forward(*, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor, None, None]:
    """Return outputs [t, h, d] and log-sum-exp [h, t]."""
    options, window = _positional(given), _window(given)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *options, False, scale=given["softmax_scale"], **window
    )
    return out, lse, None, None


def _flash_attn_varlen_backward(
    *,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    **given: Any,
) -> None:
    """Fill dq, dk and dv."""
    options, window = _positional(given), _window(given)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is not used
    grads = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out.to(q.dtype), softmax_lse, *options, unused, unused[:0],
        scale=given["softmax_scale"], **window,
    )  # fmt: skip
    for whole, part in zip((dq, dk, dv), grads, strict=True):
        whole.copy_(part)


def _positional(given: dict[str, Any]) -> list[Any]:
    """Return torch's positional arguments: offsets and maximum lengths of q and k, dropout and causality."""
    assert given["dropout_p"] == 0.0
    starts = [given[f"cu_seqlens_{end}"].int() for end in "qk"]
    return [*starts, *(given[f"max_seqlen_{end}"] for end in "qk"), 0.0, given["causal"]]


def _window(given: dict[str, Any]) -> dict[str, int | None]:
    """Return the window as torch's arguments, with None for no limit."""
    sides = {side: given.get(f"window_size_{side}", -1) for side in ("left", "right")}
    return {f"window_size_{side}": None if keys < 0 else keys for side, keys in sides.items()}
