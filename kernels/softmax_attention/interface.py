"""Public interface of causal softmax attention: argument checks and choice of an implementation."""

from typing import Literal

from torch import Tensor

from kernels.common.dispatch import (
    Choice,
    check_attention,
    check_positive_int,
    choose,
    full_precision,
    on_gpu,
    resolve_scale,
)
from kernels.softmax_attention.flex import flex_unsupported_reason, softmax_attention_flex
from kernels.softmax_attention.reference import softmax_attention_reference
from kernels.softmax_attention.sdpa import softmax_attention_sdpa

Implementation = Literal["auto", "reference", "sdpa", "flex"]
_IMPLEMENTATIONS = {
    "reference": softmax_attention_reference,
    "sdpa": softmax_attention_sdpa,
    "flex": softmax_attention_flex,
}
FEW_QUERIES = 128
"""Below this number of queries, a mask is small, and the number of keys may change with each call, as in decoding."""


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    query_offset: int = 0,
    implementation: Implementation = "auto",
) -> Tensor:
    """Causal softmax attention with grouped-query heads, sliding window and ALiBi.

    o_t = sum over visible j of softmax_j(scale * q_t.k_j - slope * (t - j)) v_j, softmax in fp32 (float64 for float64).

    Args:
        q: queries [b, tq, hq, d]; fp32, bf16, fp16 or float64.
        k: keys [b, tk, hkv, d], hq a multiple of hkv; query head h uses key head h // (hq // hkv).
        v: values [b, tk, hkv, dv].
        scale: positive factor on q.k; None means d**-0.5.
        window: query t sees keys t - window + 1 .. t; None for 0 .. t.
        alibi_slopes: [hq], for example from `alibi_slopes`; None for no bias. "sdpa" has no gradient for them on some
            devices.
        query_offset: global position of the first query; keys are at 0 .. tk-1.
        implementation: "reference"; "sdpa", torch's scaled_dot_product_attention; "flex", FlexAttention; or "auto".

    Returns:
        [b, tq, hq, dv] in v's dtype.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Vaswani et al. 2017 (arXiv 1706.03762); ALiBi: Press et al. 2022 (arXiv 2108.12409).
    """
    check_attention(q, k, v, query_offset)
    if window is not None:
        check_positive_int("window", window)
    if alibi_slopes is not None and alibi_slopes.shape != q.shape[2:3]:
        raise ValueError(
            f"alibi_slopes has shape {list(alibi_slopes.shape)}: give one slope per query head, {q.shape[2]}"
        )
    plain = window is None and alibi_slopes is None and query_offset == 0
    unsupported_reason = flex_unsupported_reason(q, v)
    chosen = choose(
        "softmax_attention", implementation, _IMPLEMENTATIONS, _automatic(q, plain, unsupported_reason), "reference"
    )
    if chosen.name == "flex" and unsupported_reason is not None:
        raise ValueError(f"implementation is 'flex', but {unsupported_reason}")
    with full_precision(q):
        return _IMPLEMENTATIONS[chosen.name](
            q,
            k,
            v,
            scale=resolve_scale(scale, q.shape[3] ** -0.5),
            window=window,
            alibi_slopes=alibi_slopes,
            query_offset=query_offset,
        )


def _automatic(q: Tensor, plain: bool, flex_unsupported_reason: str | None) -> Choice:
    if plain:
        return Choice(
            "sdpa", "fused on CUDA" if on_gpu(q) else f"plain causal attention, fused on {q.device.type} as well"
        )
    if not on_gpu(q):
        return Choice("reference", f"window, slopes or offset on {q.device.type}: sdpa needs a mask, too")
    if q.shape[1] < FEW_QUERIES:
        return Choice("sdpa", f"the mask of {q.shape[1]} queries is small")
    if flex_unsupported_reason is not None:
        return Choice("sdpa", f"with a full mask, because {flex_unsupported_reason}")
    return Choice("flex", "window, slopes or offset without a full mask")
