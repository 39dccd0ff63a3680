"""Public interface of Top-1 Element attention: argument checks and choice of an implementation."""

from typing import Any, Literal

import torch
from torch import Tensor

from kernels.common.dispatch import (
    check_attention,
    check_option,
    choose_triton_or_reference,
    full_precision,
    resolve_scale,
    triton_attention_unsupported_reason,
)
from kernels.common.documents import by_document, document_bounds
from kernels.top1_element.op import relative_choice, top1_element
from kernels.top1_element.reference import top1_element_reference

Estimator = Literal["straight_through", "selected"]
Implementation = Literal["auto", "reference", "triton"]

MAX_TOKENS = 2**31 - 2**16
"""Maximum total number of keys for the Triton implementation: a token index plus a block size must fit in int32."""


def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    estimator: Estimator = "straight_through",
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    query_offset: int = 0,
    return_selection: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Top-1 Element attention: o_t = v_j*, with j* the visible key of the highest score, the lowest such index.

    The forward value is exactly v_j*, in training and in inference. Gradients, with p = softmax(scale * q.k):
    "straight_through": o = sum_j a_j v_j, a = onehot(j*) + p - stop(p); "selected": o = (p_j* / stop(p_j*)) v_j*.

    Args:
        q: queries [b, tq, hq, d]; fp32, bf16, fp16 or float64.
        k: keys [b, tk, hkv, d], hq a multiple of hkv; query head h uses key head h // (hq // hkv).
        v: values [b, tk, hkv, dv], finite.
        estimator: gradient estimator, see above.
        scale: positive factor on q.k; None means d**-0.5. j* does not depend on it.
        cu_seqlens: bounds of documents packed into one row (b = 1), int [documents + 1], see
            `kernels.common.documents`. Attention stays within a document. On a GPU, `cu_seqlens` forces a device
            synchronisation; keep it on the CPU.
        query_offset: position of the first query in the row; keys are at 0 .. tk-1.
        return_selection: True to return j*.
        implementation: "reference"; "triton", which never materialises [tq, tk] and needs d = dv up to 256; or "auto"
            for Triton on a GPU where it is supported.

    Returns:
        o: output [b, tq, hq, dv] in v's dtype.
        selection: j* [b, tq, hq] int64, positions within the row or document, or None without `return_selection`.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Lu et al. 2025 (arXiv 2505.18522); the estimator is a reconstruction.
    """
    check_attention(q, k, v, query_offset)
    check_option("estimator", estimator, ("straight_through", "selected"))
    scale = resolve_scale(scale, q.shape[3] ** -0.5)
    unsupported_reason = _unsupported_reason(q, k, v)
    if choose_triton_or_reference("top1_element_attention", implementation, q, unsupported_reason).name == "triton":
        training = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        out, _, _, keys = top1_element(q, k, v, cu_seqlens, estimator, training, scale, query_offset)
        return out, relative_choice(keys, q, k, cu_seqlens) if return_selection else None
    options: dict[str, Any] = {"estimator": estimator, "scale": scale}
    with full_precision(q):
        if cu_seqlens is None:
            out, selection = top1_element_reference(q, k, v, query_offset=query_offset, **options)
        else:
            bounds = document_bounds(cu_seqlens, k.shape[0], k.shape[1])
            out, selection = by_document(top1_element_reference, q, k, v, bounds, query_offset=query_offset, **options)
    return out, selection if return_selection else None


def _unsupported_reason(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if k.shape[0] * k.shape[1] > MAX_TOKENS:
        return f"k has {k.shape[0]} rows of {k.shape[1]} keys: give at most {MAX_TOKENS} in all"
    return triton_attention_unsupported_reason(q, v)
