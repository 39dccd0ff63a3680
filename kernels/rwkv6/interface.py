"""Public interface of RWKV-6's state update: argument checks and choice of an implementation."""

from typing import Literal

from torch import Tensor

from kernels.common.dispatch import check_any_floating, check_shapes, resolve_scale
from kernels.common.fla import choose_fla_or_plain, fla_unsupported_reason, run_fla
from kernels.common.stateful import check_log_decay, check_state_op, run_plain
from kernels.rwkv6.reference import chunked, recurrent

Implementation = Literal["auto", "fla", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    u: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """State update of RWKV-6: o_t = scale * (S + diag(u) k_t v_t^T)^T r_t;  S <- diag(exp(g_t)) S + k_t v_t^T.

    Computed in fp32 (float64 for float64). r_t reads the state before it decays by g_t. The final state is an affine
    function of the initial one, independently for each value column.

    Args:
        r: receptances [b, t, h, dk], the queries of RWKV; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay [b, t, h, dk], finite and at most 0, in fp32 or float64, because 16-bit formats round long decays.
            The model computes it as -exp of the decay's logits.
        u: bonus of the current token [h, dk]; any floating dtype.
        scale: positive factor on r; None means 1.0, as RWKV does not scale.
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

    Source: Peng et al. 2024, "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence" (arXiv
    2404.05892), the recurrent form of Finch's wkv, wkv_t = s_{t-1} + diag(u) k_t^T v_t (its vectors are rows).
    """
    _check(r, k, v, g, u, initial_state)
    scale = resolve_scale(scale, 1.0)
    chosen = choose_fla_or_plain("rwkv6", implementation, fla_unsupported_reason(r), r, _IMPLEMENTATIONS)
    if chosen == "fla":
        from fla.ops.rwkv6 import chunk_rwkv6

        inputs = {"r": r, "k": k, "v": v, "w": g, "u": u.to(r.dtype)}
        return run_fla(chunk_rwkv6, inputs, scale, initial_state, output_final_state)
    return run_plain(_IMPLEMENTATIONS[chosen], (r, k, v, g, u), scale, initial_state, output_final_state)


def _check(r: Tensor, k: Tensor, v: Tensor, g: Tensor, u: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(r, k, v, initial_state, q_name="r")
    check_shapes(r, {"g": (g, r.shape), "u": (u, r.shape[2:])}, "r")
    check_log_decay(g)
    check_any_floating(u=u)
