"""Public interface of the gated delta rule: argument checks and choice of an implementation."""

from typing import Literal

import torch
from torch import Tensor

from kernels.common.dispatch import (
    MAX_TRITON_HEAD_DIM,
    check_any_floating,
    check_shapes,
    choose_triton_or_reference,
    full_precision,
    on_gpu,
    resolve_scale,
    triton_unsupported_reason,
)
from kernels.common.stateful import check_log_decay, check_state_op, run_plain
from kernels.gated_delta_rule.op import gated_delta_rule_triton
from kernels.gated_delta_rule.reference import chunked, recurrent

Implementation = Literal["auto", "triton", "chunked", "recurrent"]
_PLAIN = {"chunked": chunked, "recurrent": recurrent}


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule: the state decays by exp(g_t), then moves its value for key k_t by beta_t towards v_t.

    S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = scale * S^T q_t, all in fp32 (float64 for float64).
    Normalise the keys first. The state can grow without bound if keys are longer than 1 and beta is near 1.

    Args:
        q: queries [b, t, h, dk]; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, dk].
        v: values [b, t, h, dv].
        g: log decay [b, t, h], finite and at most 0, in fp32 or float64, because 16-bit formats round long decays. None
            for no decay.
        beta: write strength [b, t, h], in (0, 1); any floating dtype.
        scale: positive factor on q; None means dk**-0.5.
        initial_state: state before the first token [b, h, dk, dv], any floating dtype; None for zeros.
        output_final_state: True to return the state after the last token.
        implementation: "triton" for bf16 or fp16 and dk up to 256; "chunked" or "recurrent" in plain torch; "auto" for
            Triton on a GPU where it is supported, else chunked.

    Returns:
        o: output [b, t, h, dv] in v's dtype.
        state: state after the last token [b, h, dk, dv] in fp32 (float64 for float64), or None without
            `output_final_state`.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464).
    """
    _check(q, k, v, g, beta, initial_state)
    scale = resolve_scale(scale, q.shape[-1] ** -0.5)
    chosen = choose_triton_or_reference("gated_delta_rule", implementation, q, _unsupported_reason(q), tuple(_PLAIN))
    if chosen.name == "triton":
        with full_precision(q):
            out, state = gated_delta_rule_triton(q, k, v, g, beta, scale=scale, initial_state=initial_state)
        return out, state if output_final_state else None
    if g is None:
        g = torch.zeros(q.shape[:3], device=q.device)
    return run_plain(_PLAIN[chosen.name], (q, k, v, g, beta), scale, initial_state, output_final_state)


def _unsupported_reason(q: Tensor) -> str | None:
    unsupported_reason = triton_unsupported_reason(q=q)
    if unsupported_reason is not None:
        return unsupported_reason
    if on_gpu(q) and q.dtype == torch.float32:
        return "q has dtype torch.float32, for which a GPU has no fast matrix product: convert it to torch.bfloat16"
    if q.shape[3] > MAX_TRITON_HEAD_DIM:
        return f"q has head_dim {q.shape[3]}: give at most {MAX_TRITON_HEAD_DIM}"
    return None


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor, initial_state: Tensor | None) -> None:
    check_state_op(q, k, v, initial_state)
    check_shapes(q, {"beta": (beta, q.shape[:3])})
    check_any_floating(beta=beta)
    if g is not None:
        check_shapes(q, {"g": (g, q.shape[:3])})
        check_log_decay(g)
