"""Public interface of Based's linear attention: argument checks and choice of an implementation."""

from typing import Literal

import torch
from torch import Tensor

from kernels.based.op import based_triton
from kernels.based.reference import chunked
from kernels.common.dispatch import choose_triton_or_reference, full_precision, on_gpu, triton_unsupported_reason
from kernels.common.stateful import check_state_op

Implementation = Literal["auto", "triton", "chunked"]

MAX_FEATURE_DIM = 32
MAX_VALUE_DIM = 256


def based(q: Tensor, k: Tensor, v: Tensor, *, implementation: Implementation = "auto") -> Tensor:
    """Based's linear attention: o_t = sum_j w_tj v_j / sum_j w_tj over j <= t, w = 1 + s + s^2 / 2, s = q.k / sqrt(f).

    Computed in fp32 (float64 for float64), with TF32 matrix products in the Triton kernels. There is no initial state;
    use `by_features` with a linear attention that takes one.

    Args:
        q: queries [b, t, h, f]; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, f].
        v: values [b, t, h, e].
        implementation: "triton" for bf16 or fp16, f up to 32 and e up to 256; "chunked" in plain torch; "auto" for
            Triton on a GPU where it is supported, else chunked.

    Returns:
        o [b, t, h, e] in v's dtype.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Arora et al. 2024, "Simple linear attention language models balance the recall-throughput tradeoff" (arXiv
    2402.18668), linear attention with the second-order Taylor approximation of the exponential.
    """
    check_state_op(q, k, v, None)
    chosen = choose_triton_or_reference("based", implementation, q, _unsupported_reason(q, v), ("chunked",))
    if chosen.name == "chunked":
        return chunked(q, k, v)
    with full_precision(q):
        return based_triton(q, k, v)


def _unsupported_reason(q: Tensor, v: Tensor) -> str | None:
    unsupported_reason = triton_unsupported_reason(q=q)
    if unsupported_reason is not None:
        return unsupported_reason
    if on_gpu(q) and q.dtype == torch.float32:
        return "q has dtype torch.float32, which the kernel would round to TF32: convert it to torch.bfloat16"
    for name, x, most in (("q", q, MAX_FEATURE_DIM), ("v", v, MAX_VALUE_DIM)):
        if x.shape[3] > most:
            return f"{name} has head_dim {x.shape[3]}: give at most {most}"
    return None
