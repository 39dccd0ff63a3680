"""The public form of the gated delta rule: checks, and the choice of an implementation."""

from typing import Literal, overload

from torch import Tensor

from kernels.dispatch import Choice, check_any_floating, check_shapes, choose
from kernels.gated_delta_rule.reference import chunked, recurrent
from kernels.stateful import check_log_decay, check_state_op, run_form

Implementation = Literal["auto", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
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
    g: Tensor,
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
    g: Tensor,
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
        g: log decay [b, t, h], finite and at most 0; fp32 (or float64), as 16 bits round the decay of long spans.
        beta: strength of writing [b, t, h], in (0, 1); any floating dtype.
        scale: positive factor on q; None means dk**-0.5.
        initial_state: [b, h, dk, dv] before the first token; None for zeros.
        return_final_state: also return the state after the last token.
        implementation: "recurrent", "chunked", or "auto".

    Returns:
        o [b, t, h, dv] in v's dtype; with return_final_state also the state [b, h, dk, dv] in fp32 (or float64).

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464).
    """
    _check(q, k, v, g, beta, initial_state)
    automatic = Choice("chunked", "the faster of the plain torch forms")
    chosen = choose("gated_delta_rule", implementation, _IMPLEMENTATIONS, automatic)
    return run_form(_IMPLEMENTATIONS[chosen.name], (q, k, v, g, beta), scale, initial_state, return_final_state)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(q, k, v, initial_state)
    check_shapes(q, {"g": (g, q.shape[:3]), "beta": (beta, q.shape[:3])})
    check_log_decay(g)
    check_any_floating(beta=beta)
