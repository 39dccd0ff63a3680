"""The public form of gated linear attention: checks, and the choice of an implementation."""

from typing import Literal, overload

import torch
from torch import Tensor

from kernels.dispatch import Choice, check_shapes, choose
from kernels.gated_linear_attention.reference import chunked, recurrent
from kernels.stateful import check_log_decay, check_state_op, run_form

Implementation = Literal["auto", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


@overload
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = ...,
    *,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Tensor: ...
@overload
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = ...,
    *,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...
def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    implementation: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention with a decay: S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = scale * S^T q_t.

    In fp32 (float64 for float64). Without g this is linear attention with q and k as they are (no normaliser).

    Args:
        q: queries [b, t, h, dk]; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay, finite and at most 0, [b, t, h] or one a key feature [b, t, h, dk]; fp32 (or float64), as 16 bits
            round the decay of long spans. None: nothing decays.
        scale: positive factor on q; None means dk**-0.5.
        initial_state: [b, h, dk, dv] before the first token; None for zeros.
        return_final_state: also return the state after the last token.
        implementation: "recurrent", "chunked", or "auto".

    Returns:
        o [b, t, h, dv] in v's dtype; with return_final_state also the state [b, h, dk, dv] in fp32 (or float64).

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635);
    with g [b, t, h], Sun et al. 2023, "Retentive Network" (arXiv 2307.08621).
    """
    _check(q, k, v, g, initial_state)
    automatic = Choice("chunked", "the faster of the plain torch forms")
    chosen = choose("gated_linear_attention", implementation, _IMPLEMENTATIONS, automatic)
    if g is None:
        g = torch.zeros(q.shape[:3], device=q.device)
    inputs = (q, k, v, g if g.dim() == 4 else g[..., None])
    return run_form(_IMPLEMENTATIONS[chosen.name], inputs, scale, initial_state, return_final_state)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None) -> None:
    check_state_op(q, k, v, initial_state)
    if g is None:
        return
    check_shapes(q, {"g": (g, q.shape if g.dim() == 4 else q.shape[:3])})
    check_log_decay(g)
