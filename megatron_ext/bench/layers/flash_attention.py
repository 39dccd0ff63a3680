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


def install_flash_attn_replacement() -> bool:
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
    cu_seqlens = torch.arange(0, (batch + 1) * length, length, device=q.device, dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, length, length, causal=causal, window_size=window_size
    )
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
    options = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": causal,
        "window_size_left": window_size[0],
        "window_size_right": window_size[1],
    }
    out: Tensor = _Attention.apply(q, k, v, options)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        out, lse, *_ = _flash_attn_varlen_forward(q=q, k=k, v=v, dropout_p=0.0, **options)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        options = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse, "dq": dq, "dk": dk, "dv": dv}
        _flash_attn_varlen_backward(**options, dropout_p=0.0, **ctx.options)
        return dq, dk, dv, None


def _flash_attn_varlen_forward(*, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor, None, None]:
    """Return outputs [t, h, d] and log-sum-exp [h, t]."""
    positional, window = _positional(options), _window(options)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *positional, False, scale=options["softmax_scale"], **window
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
    **options: Any,
) -> None:
    """Fill dq, dk and dv."""
    positional, window = _positional(options), _window(options)
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is not used
    grads = torch.ops.aten._flash_attention_backward(
        dout.contiguous(), q, k, v, out.to(q.dtype), softmax_lse, *positional, unused, unused[:0],
        scale=options["softmax_scale"], **window,
    )  # fmt: skip
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


def _positional(options: dict[str, Any]) -> list[Any]:
    """Return torch's positional arguments: offsets and maximum lengths of q and k, dropout and causality."""
    assert options["dropout_p"] == 0.0
    cu_seqlens = [options[f"cu_seqlens_{name}"].int() for name in "qk"]
    return [*cu_seqlens, *(options[f"max_seqlen_{name}"] for name in "qk"), 0.0, options["causal"]]


def _window(options: dict[str, Any]) -> dict[str, int | None]:
    """Return the window as torch's arguments, with None for no limit."""
    sides = {side: options.get(f"window_size_{side}", -1) for side in ("left", "right")}
    return {f"window_size_{side}": None if keys < 0 else keys for side, keys in sides.items()}
