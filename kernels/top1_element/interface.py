"""The public form of Top-1 Element selection: checks, and the choice of an implementation."""

from typing import Literal, overload

from torch import Tensor

from kernels.dispatch import Choice, check_attention, check_option, choose, full_precision, resolve_scale
from kernels.top1_element.reference import top1_element_reference

Estimator = Literal["straight_through", "selected"]
Implementation = Literal["auto", "reference"]
_IMPLEMENTATIONS = {"reference": top1_element_reference}


@overload
def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    estimator: Estimator = ...,
    scale: float | None = ...,
    query_offset: int = ...,
    return_selection: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Tensor: ...
@overload
def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    estimator: Estimator = ...,
    scale: float | None = ...,
    query_offset: int = ...,
    return_selection: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...
def top1_element_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    estimator: Estimator = "straight_through",
    scale: float | None = None,
    query_offset: int = 0,
    return_selection: bool = False,
    implementation: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Top-1 Element selection: o_t = v_j*, j* the visible key with the highest score, the lowest such index.

    The forward value is v_j* to the last bit, in training and in inference. Gradients, with p = softmax(scale * q.k):
    "straight_through": o = sum_j a_j v_j, a = onehot(j*) + p - stop(p); "selected": o = (p_j* / stop(p_j*)) v_j*.

    Args:
        q: queries [b, tq, hq, d]; fp32, bf16, fp16 or float64.
        k: keys [b, tk, hkv, d], hq a multiple of hkv; query head h uses key head h // (hq // hkv).
        v: values [b, tk, hkv, dv], finite.
        estimator: which gradient.
        scale: positive factor on q.k; None means d**-0.5.
        query_offset: global position of the first query; keys are at 0 .. tk-1.
        return_selection: also return j*.
        implementation: "reference", or "auto".

    Returns:
        o [b, tq, hq, dv] in v's dtype; with return_selection also j* [b, tq, hq] int64, global positions.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Lu et al. 2025 (arXiv 2505.18522); the estimator is a reconstruction.
    """
    check_attention(q, k, v, query_offset)
    check_option("estimator", estimator, ("straight_through", "selected"))
    automatic = Choice("reference", "the only one")
    chosen = choose("top1_element_attention", implementation, _IMPLEMENTATIONS, automatic)
    with full_precision(q):
        out, selection = _IMPLEMENTATIONS[chosen.name](
            q, k, v, estimator=estimator, scale=resolve_scale(scale, q.shape[3]), query_offset=query_offset
        )
    return (out, selection) if return_selection else out
