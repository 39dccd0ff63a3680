"""The public form of the gated delta rule: checks, and the choice of an implementation."""

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor

from kernels.dispatch import check_any_floating, check_shapes, resolve_scale
from kernels.fla import choose_fla_or_plain, fla_obstacle, refused_on_hopper, run_fla
from kernels.gated_delta_rule.reference import chunked, recurrent
from kernels.stateful import check_log_decay, check_state_op, run_form

Implementation = Literal["auto", "fla", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Tensor: ...
@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    implementation: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule: a state that decays by exp(g_t) and is corrected towards v_t at k_t by beta_t.

    S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale * S^T q_t, all in fp32 (float64 for float64).
    Keys of length above 1 (with beta near 1) make the state grow: normalise them first.

    Args:
        q: queries [b, t, h, dk]; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay [b, t, h], finite and at most 0; fp32 (or float64), as 16 bits round the decay of long spans. None:
            nothing decays.
        beta: strength of writing [b, t, h], in (0, 1); any floating dtype.
        scale: positive factor on q; None means dk**-0.5.
        initial_state: [b, h, dk, dv] before the first token; None for zeros.
        return_final_state: also return the state after the last token.
        implementation: "fla" (a GPU, bf16 or fp16), "recurrent", "chunked", or "auto".

    Returns:
        o [b, t, h, dv] in v's dtype; with return_final_state also the state [b, h, dk, dv] in fp32 (or float64).

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464).
    """
    _check(q, k, v, g, beta, initial_state)
    obstacle = fla_obstacle(q, lambda: None if g is None else refused_on_hopper(tilelang_helps=True))
    chosen = choose_fla_or_plain("gated_delta_rule", implementation, obstacle, q, _IMPLEMENTATIONS)
    if chosen == "fla":
        inputs = {"q": q, "k": k, "v": v, "beta": beta} | ({} if g is None else {"g": g})
        scale = resolve_scale(scale, q.shape[-1])
        decays = g is not None
        return run_fla(_of_fla(decays=decays), inputs, scale, initial_state, return_final_state, values_first=decays)
    if g is None:
        g = torch.zeros(q.shape[:3], device=q.device)
    return run_form(_IMPLEMENTATIONS[chosen], (q, k, v, g, beta), scale, initial_state, return_final_state)


def _of_fla(*, decays: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if decays:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    from fla.ops.delta_rule import chunk_delta_rule

    return chunk_delta_rule


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(q, k, v, initial_state)
    check_shapes(q, {"beta": (beta, q.shape[:3])})
    check_any_floating(beta=beta)
    if g is not None:
        check_shapes(q, {"g": (g, q.shape[:3])})
        check_log_decay(g)
