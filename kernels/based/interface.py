"""The public form of Based's linear attention: checks, and the choice of an implementation."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from kernels.based.features import by_features, num_features
from kernels.based.reference import chunked
from kernels.dispatch import full_precision
from kernels.fla import MAX_KEY_DIM, choose_fla_or_plain, fla_obstacle, run_fla
from kernels.stateful import check_state_op

Implementation = Literal["auto", "fla", "chunked"]

QUADRATIC_UP_TO = 4096
"""Positions up to which fla's form weighs every pair.

An estimate for heads of 64 on an H200, not a measurement. Weighing pairs at some 130 TFLOP/s takes 2 ms forward and
backward for 400,000 rows (positions x heads) of 2,048 positions, and as many times more as sequences are longer. Linear
attention with 160 features reads and writes some 6 KB a row, whatever the length: 2 to 3 ms. fla's third form,
`fused_chunk_based`, walks over the sequence in steps of 16 with some 2 blocks a head: 6,400 steps at 102,400 positions,
on few of the processors.
"""

MAX_FEATURE_DIM = 128
WHOLE_VECTORS = 16
"""Widths that are multiples of this let fla's kernels read 16 bytes at a time; odd ones they refuse."""


def based(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    implementation: Implementation = "auto",
    quadratic_up_to: int = QUADRATIC_UP_TO,
) -> Tensor:
    """Based's linear attention: o_t = sum_j w_tj v_j / sum_j w_tj over j <= t, w = 1 + s + s^2 / 2, s = q.k / sqrt(f).

    In fp32 (float64 for float64); "fla" rounds weights, or features, and both sums to bf16. It begins with the
    sequence: for a state before it, see `by_features`.

    Args:
        q: queries [b, t, h, f]; fp32, bf16, fp16 or float64.
        k: keys [b, t, h, f].
        v: values [b, t, h, e].
        implementation: "fla" (a GPU, bf16), "chunked", or "auto".
        quadratic_up_to: positions up to which "fla" weighs every pair; for longer ones it makes features.

    Returns:
        o [b, t, h, e] in v's dtype.

    Raises:
        ValueError: an argument does not fit; the message names it.

    Source: Arora et al. 2024, "Simple linear attention language models balance the recall-throughput tradeoff" (arXiv
    2402.18668), linear attention with the second-order Taylor approximation of the exponential.
    """
    check_state_op(q, k, v, None)
    in_pairs = q.shape[1] <= quadratic_up_to
    obstacle = fla_obstacle(q, partial(_refused, q, in_pairs))
    if choose_fla_or_plain("based", implementation, obstacle, q, ["chunked"]) == "chunked":
        return chunked(q, k, v)
    with full_precision(q):
        return _fla_by_pairs(q, k, v) if in_pairs else _fla_by_features(q, k, v)


def _refused(q_bthf: Tensor, in_pairs: bool) -> str | None:
    """What is in the way of fla's form beside what is in the way of every op's, with the mend; None: nothing."""
    if q_bthf.dtype != torch.bfloat16:
        return f"sums of weights can be too large for {q_bthf.dtype}: convert the inputs to {torch.bfloat16}"
    length, width = q_bthf.shape[1], q_bthf.shape[3]
    if in_pairs and width > MAX_FEATURE_DIM:
        return f"queries are {width} wide: give at most {MAX_FEATURE_DIM}"
    if not in_pairs and num_features(width) > MAX_KEY_DIM:
        features = num_features(width)
        return (
            f"queries {width} wide have {features} features, for {length} positions at most {MAX_KEY_DIM}: narrow them"
        )
    return None


def _fla_by_pairs(q_bthf: Tensor, k_bthf: Tensor, v_bthe: Tensor) -> Tensor:
    from fla.ops.based import parallel_based

    # Its scale is ours; it adds 1e-6 to a sum of weights, each at least 1/2.
    out: Tensor = parallel_based(q_bthf, k_bthf, v_bthe)
    return out


def _fla_by_features(q_bthf: Tensor, k_bthf: Tensor, v_bthe: Tensor) -> Tensor:
    from fla.ops.simple_gla import chunk_simple_gla

    def walk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sums: Tensor = run_fla(chunk_simple_gla, {"q": q, "k": k, "v": v}, 1.0, None, False)
        return sums

    return by_features(q_bthf, k_bthf, v_bthe, walk, dtype=q_bthf.dtype, multiple=WHOLE_VECTORS)
