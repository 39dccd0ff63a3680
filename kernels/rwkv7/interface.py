"""The public form of RWKV-7's state update: checks, and the choice of an implementation."""

from functools import partial
from typing import Literal, overload

from torch import Tensor

from kernels.dispatch import check_any_floating, check_shapes
from kernels.fla import choose_fla_or_plain, fla_obstacle, run_fla
from kernels.rwkv7.reference import chunked, recurrent
from kernels.stateful import check_log_decay, check_state_op, run_form

Implementation = Literal["auto", "fla", "recurrent", "chunked"]
_IMPLEMENTATIONS = {"recurrent": recurrent, "chunked": chunked}


@overload
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = ...,
    log_decay_bound: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[False] = ...,
    implementation: Implementation = ...,
) -> Tensor: ...
@overload
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = ...,
    log_decay_bound: float | None = ...,
    initial_state: Tensor | None = ...,
    return_final_state: Literal[True],
    implementation: Implementation = ...,
) -> tuple[Tensor, Tensor]: ...
def rwkv7(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    log_decay_bound: float | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    implementation: Implementation = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """RWKV-7's state update: S <- (diag(exp(w_t)) + b_t a_t^T) S + k_t v_t^T;  o_t = scale * S^T r_t.

    In fp32 (float64 for float64). a_t reads the state before it decays by w_t; r_t reads it after token t. The model
    has a = -kappa_hat, of length 1, and b = kappa_hat * in-context learning rate; a and b that are large for the decay
    make the state grow. The bonus of the present token is no part of the state and not in here. The state's last value
    is an affine function of its first, each value column by itself.

    Args:
        r: receptances [b, t, h, dk], which read the state as queries do; fp32, bf16, fp16 or float64.
        w: log decay, finite and at most 0, [b, t, h, dk]; fp32 (or float64), as 16 bits round the decay of long spans.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        a: what is read from the old state [b, t, h, dk]; any floating dtype.
        b: where the read is added [b, t, h, dk]; any floating dtype.
        scale: positive factor on r; None means 1.0, as RWKV has none.
        log_decay_bound: the caller's promise that no w is below it, negative; None: no promise. With one of -0.6, as
            the model has, "fla" takes tensor cores and longer chunks; a w far below it would overflow there. The other
            forms have no use for it.
        initial_state: [b, h, dk, dv] before the first token; None for zeros.
        return_final_state: also return the state after the last token.
        implementation: "fla" (a GPU, bf16 or fp16), "recurrent", "chunked", or "auto".

    Returns:
        o [b, t, h, dv] in v's dtype; with return_final_state also the state [b, h, dk, dv] in fp32 (or float64).

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Peng et al. 2025, 'RWKV-7 "Goose" with Expressive Dynamic State Evolution' (arXiv 2503.14456), the evolution
    of the state, wkv_t = wkv_{t-1} (diag(w_t) - kappa_hat_t^T (a_t * kappa_hat_t)) + v_t^T k_t. Its vectors are rows,
    its w is exp of ours, its a is the learning rate, and our state is its wkv transposed.
    """
    _check(r, w, k, v, a, b, initial_state)
    if log_decay_bound is not None and not log_decay_bound < 0:
        raise ValueError(f"log_decay_bound is {log_decay_bound!r}: give a negative number, or None")
    chosen = choose_fla_or_plain("rwkv7", implementation, fla_obstacle(r), r, _IMPLEMENTATIONS)
    scale = 1.0 if scale is None else scale
    if chosen == "fla":
        from fla.ops.rwkv7 import chunk_rwkv7

        inputs = {"r": r, "w": w, "k": k, "v": v, "a": a.to(r.dtype), "b": b.to(r.dtype)}
        # From the bound it tells which chunks are safe, and takes its safe_gate.
        op = partial(chunk_rwkv7, lower_bound=log_decay_bound)
        return run_fla(op, inputs, scale, initial_state, return_final_state)
    return run_form(_IMPLEMENTATIONS[chosen], (r, k, v, w, a, b), scale, initial_state, return_final_state)


def _check(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(r, k, v, initial_state, reader="r")
    check_shapes(r, {"w": (w, r.shape), "a": (a, r.shape), "b": (b, r.shape)}, "r")
    check_log_decay(w, "w")
    check_any_floating(a=a, b=b)
