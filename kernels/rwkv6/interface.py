"""Public interface of RWKV-6's state update: argument checks and choice of an implementation."""

from typing import Literal, overload

from torch import Tensor

from kernels.common.dispatch import check_any_floating, check_shapes
from kernels.common.fla import choose_fla_or_plain, fla_unsupported_reason, run_fla
from kernels.common.stateful import check_log_decay, check_state_op, run_form
from kernels.rwkv6.reference import chunked, recurrent

Implementation = Literal["auto", "fla", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


@overload
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Tensor: ...
@overload
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...
def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    implementation: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """State update of RWKV-6: o_t = scale * (S + diag(u) k_t v_t^T)^T r_t;  S <- diag(exp(g_t)) S + k_t v_t^T.

    Computed in fp32 (float64 for float64). r_t reads the state before it decays by g_t. The final state is an affine
    function of the initial one, independently for each value column.

    Args:
        r: receptances [b, t, h, dk], which read the state as queries do; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay [b, t, h, dk], finite and at most 0, in fp32 or float64, because 16-bit formats round long decays.
            The model computes it as -exp of the decay's logits.
        u: bonus of the current token [h, dk]; any floating dtype.
        scale: positive factor on r; None means 1.0, as RWKV has none.
        initial_state: [b, h, dk, dv] before the first token; None for zeros.
        return_final_state: also return the state after the last token.
        implementation: "fla" (a GPU, bf16 or fp16); "recurrent" or "chunked" in plain torch; "auto" for fla where it is
            supported, else chunked.

    Returns:
        o [b, t, h, dv] in v's dtype. With return_final_state also the state [b, h, dk, dv] in fp32 (or float64).

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (arXiv
    2404.05892), the recurrent form of Finch's wkv, wkv_t = s_{t-1} + diag(u) k_t^T v_t (its vectors are rows).
    """
    _check(r, k, v, g, u, initial_state)
    chosen = choose_fla_or_plain("rwkv6", implementation, fla_unsupported_reason(r), r, _IMPLEMENTATIONS)
    scale = 1.0 if scale is None else scale
    if chosen == "fla":
        from fla.ops.rwkv6 import chunk_rwkv6

        inputs = {"r": r, "k": k, "v": v, "w": g, "u": u.to(r.dtype)}
        return run_fla(chunk_rwkv6, inputs, scale, initial_state, return_final_state)
    return run_form(_IMPLEMENTATIONS[chosen], (r, k, v, g, u), scale, initial_state, return_final_state)


def _check(r: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(r, k, v, initial_state, reader="r")
    check_shapes(r, {"g": (g, r.shape), "u": (u, r.shape[2:])}, "r")
    check_log_decay(g)
    check_any_floating(u=u)
