"""Public interface of gated linear attention: argument checks and choice of an implementation."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kernels.common.dispatch import check_shapes, resolve_scale
from kernels.common.fla import choose_fla_or_plain, fla_unsupported_reason, hopper_unsupported_reason, run_fla
from kernels.common.stateful import check_log_decay, check_state_op, run_plain
from kernels.gated_linear_attention.reference import chunked, recurrent

Implementation = Literal["auto", "fla", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention with decay: S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = scale * S^T q_t.

    Computed in fp32 (float64 for float64). There is neither a feature map nor a normaliser.

    Args:
        q: queries [b, t, h, dk]; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay, finite and at most 0: per token [b, t, h], per key feature [b, t, h, dk], or constant over tokens
            [h]. In fp32 or float64, because 16-bit formats round long decays. None for no decay.
        scale: positive factor on q; None means dk**-0.5.
        initial_state: state before the first token [b, h, dk, dv], any floating dtype; None for zeros.
        output_final_state: True to return the state after the last token.
        implementation: "fla" (a GPU, bf16 or fp16); "recurrent" or "chunked" in plain torch; "auto" for fla where it is
            supported, else chunked.

    Returns:
        o: output [b, t, h, dv] in v's dtype.
        state: state after the last token [b, h, dk, dv] in fp32 (float64 for float64), or None without
            `output_final_state`.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Yang et al. 2023, "Gated Linear Attention Transformers with Hardware-Efficient Training" (arXiv 2312.06635);
    with g [h], Sun et al. 2023, "Retentive Network" (arXiv 2307.08621).
    """
    _check(q, k, v, g, initial_state)
    scale = resolve_scale(scale, q.shape[-1] ** -0.5)
    if g is not None and g.dim() == 1 and g.requires_grad:
        g = g.expand(q.shape[:3])  # fla has no gradient for a decay that is constant over tokens
    unsupported_reason = fla_unsupported_reason(q, lambda: hopper_unsupported_reason() if _decays_by_head(g) else None)
    chosen = choose_fla_or_plain("gated_linear_attention", implementation, unsupported_reason, q, _IMPLEMENTATIONS)
    if chosen == "fla":
        decays = {} if g is None else {"g_gamma" if g.dim() == 1 else "g": g}
        inputs, by_feature = {"q": q, "k": k, "v": v} | decays, g is not None and g.dim() == 4
        return run_fla(_fla_op(g), inputs, scale, initial_state, output_final_state, values_first=by_feature)
    if g is None:
        g = torch.zeros(q.shape[:3], device=q.device)
    decay = g if g.dim() == 4 else g.expand(q.shape[:3])[..., None]
    return run_plain(_IMPLEMENTATIONS[chosen], (q, k, v, decay), scale, initial_state, output_final_state)


def _decays_by_head(g: Tensor | None) -> bool:
    return g is not None and g.dim() == 3


def _fla_op(g: Tensor | None) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if g is not None and g.dim() == 4:
        from fla.ops.gla import chunk_gla

        return chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None) -> None:
    check_state_op(q, k, v, initial_state)
    if g is None:
        return
    shapes = {1: q.shape[2:3], 4: q.shape}
    check_shapes(q, {"g": (g, shapes.get(g.dim(), q.shape[:3]))})
    check_log_decay(g)
