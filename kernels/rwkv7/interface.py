"""Public interface of RWKV-7's state update: argument checks and choice of an implementation."""

from functools import partial
from typing import Literal

from torch import Tensor

from kernels.common.dispatch import check_any_floating, check_shapes, resolve_scale
from kernels.common.fla import choose_fla_or_plain, fla_unsupported_reason, run_fla
from kernels.common.stateful import check_log_decay, check_state_op, run_plain
from kernels.rwkv7.reference import chunked, recurrent

Implementation = Literal["auto", "fla", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


def rwkv7(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    log_decay_bound: float | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """State update of RWKV-7: S <- (diag(exp(g_t)) + b_t a_t^T) S + k_t v_t^T;  o_t = scale * S^T r_t.

    Computed in fp32 (float64 for float64). a_t reads the state before it decays by g_t; r_t reads it after token t. The
    model has a = -kappa_hat, of length 1, and b = kappa_hat * in-context learning rate. If a and b are large relative
    to the decay, the state grows. The bonus of the current token does not enter the state and is not included here. The
    final state is an affine function of the initial one, independently for each value column.

    Args:
        r: receptances [b, t, h, dk], the queries of RWKV; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay [b, t, h, dk], finite and at most 0, in fp32 or float64, because 16-bit formats round long decays.
        a: direction in which the old state is read [b, t, h, dk]; any floating dtype.
        b: direction in which the result of that read is written [b, t, h, dk]; any floating dtype.
        log_decay_bound: negative lower bound of g that the caller guarantees; None for no guarantee. With the model's
            bound of -0.6, "fla" uses tensor cores and longer chunks, where a g far below the bound would overflow. The
            other implementations ignore it.
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

    Source: Peng et al. 2025, 'RWKV-7 "Goose" with Expressive Dynamic State Evolution' (arXiv 2503.14456), with
    wkv_t = wkv_{t-1} (diag(w_t) - kappa_hat_t^T (a_t * kappa_hat_t)) + v_t^T k_t. Its vectors are rows, its w is
    exp(g), its a is the in-context learning rate, and its wkv is the transpose of our state.
    """
    _check(r, k, v, g, a, b, initial_state)
    if log_decay_bound is not None and not log_decay_bound < 0:
        raise ValueError(f"log_decay_bound is {log_decay_bound!r}: give a negative number, or None")
    scale = resolve_scale(scale, 1.0)
    chosen = choose_fla_or_plain("rwkv7", implementation, fla_unsupported_reason(r), r, _IMPLEMENTATIONS)
    if chosen == "fla":
        from fla.ops.rwkv7 import chunk_rwkv7

        inputs = {"r": r, "w": g, "k": k, "v": v, "a": a.to(r.dtype), "b": b.to(r.dtype)}
        # From the bound, fla derives its chunk size and the option safe_gate.
        op = partial(chunk_rwkv7, lower_bound=log_decay_bound)
        return run_fla(op, inputs, scale, initial_state, output_final_state)
    return run_plain(_IMPLEMENTATIONS[chosen], (r, k, v, g, a, b), scale, initial_state, output_final_state)


def _check(r: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(r, k, v, initial_state, q_name="r")
    check_shapes(r, {"g": (g, r.shape), "a": (a, r.shape), "b": (b, r.shape)}, "r")
    check_log_decay(g)
    check_any_floating(a=a, b=b)
