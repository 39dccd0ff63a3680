"""Our ops as contestants. Choices are compared with float64 scores, outputs with float64 for the given choices."""

import torch
from torch import Tensor

from kernels.bench import costs
from kernels.bench.cases import Shape
from kernels.bench.contestant import ChoiceComparison, Contestant, TimedPart
from kernels.common.attention_math import causal_mask, mix_values, query_key_products, query_positions, visible_softmax
from kernels.softmax_attention.reference import attend
from kernels.top1_chunk import top1_chunk_attention
from kernels.top1_chunk.interface import Implementation, Score
from kernels.top1_chunk.reference import chunk_scores, select_chunks, selection_mask
from kernels.top1_element import top1_element_attention
from kernels.top1_element.interface import Estimator
from kernels.top1_element.reference import select_elements, selected_weights, straight_through_weights

ROUNDING = {"approx": 2.0**-7, "exact": 2.0**-20, "exact_lse": 2.0**-18}
"""Largest difference, relative to |q| |k|, of two scores that an op may treat as equal.

approx: both mean keys are rounded to bf16, 2^-9 of each element. exact: fp32 sums of exact products. exact_lse: uses
the hardware's exp2 and log2, which are accurate to 2^-22 of a value.
"""


def top1_chunk(
    shape: Shape, *, score: Score, chunk_size: int, top_k: int, implementation: Implementation
) -> Contestant:
    """Build the contestant of Top-1 Chunk with one kind of score."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = top1_chunk_attention(
            q, k, v, score=score, chunk_size=chunk_size, top_k=top_k, implementation=implementation
        )
        return out

    def run_with_choices(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, chosen = top1_chunk_attention(
            q, k, v, score=score, chunk_size=chunk_size, top_k=top_k, return_selection=True,
            implementation=implementation,
        )  # fmt: skip
        assert chosen is not None
        return out, chosen

    def reference(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, query_offset: int) -> Tensor:
        assert chosen is not None
        visible = selection_mask(chosen, q, k, chunk_size=chunk_size, local=True, query_offset=query_offset)
        return attend(q, k, v, visible, q.shape[3] ** -0.5)

    def compare(q: Tensor, k: Tensor, chosen: Tensor, query_offset: int) -> ChoiceComparison:
        return compare_chunks(q, k, chosen, score=score, chunk_size=chunk_size, query_offset=query_offset)

    part = TimedPart(run=run_with_choices, reference=reference, compare=compare)
    return Contestant(run=run, parts=(part,), operations=costs.top1_chunk(shape, score, chunk_size, top_k))


def top1_element(shape: Shape, *, estimator: Estimator, chunk_size: int, implementation: Implementation) -> Contestant:
    """Build the contestant of Top-1 Element with one estimator; `chunk_size` is only used to summarise its choices."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = top1_element_attention(q, k, v, estimator=estimator, implementation=implementation)
        return out

    def run_with_choices(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, chosen = top1_element_attention(
            q, k, v, estimator=estimator, return_selection=True, implementation=implementation
        )
        assert chosen is not None
        return out, chosen[..., None]

    def reference(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor | None, query_offset: int) -> Tensor:
        assert chosen is not None
        visible, scores = causal_mask(q, k, query_offset), query_key_products(q, k) * q.shape[3] ** -0.5
        chosen_bht = chosen[..., 0].transpose(1, 2)
        if estimator == "straight_through":
            return mix_values(straight_through_weights(visible_softmax(scores, visible), chosen_bht), v)
        return mix_values(selected_weights(scores, visible, chosen_bht), v)

    part = TimedPart(
        run=run_with_choices, reference=reference, compare=compare_elements, limit=0.0, keys_per_choice=chunk_size
    )
    return Contestant(run=run, parts=(part,), operations=costs.top1_element(shape, estimator))


def compare_chunks(
    q_bthd: Tensor, k_bshd: Tensor, chosen_bthm: Tensor, *, score: str, chunk_size: int, query_offset: int
) -> ChoiceComparison:
    """Compare selected chunks, rank by rank, with the best by score. Arguments as in `select_chunks`, in float64."""
    scale, top_k = q_bthd.shape[3] ** -0.5, chosen_bthm.shape[3]
    best_bthm = select_chunks(
        q_bthd, k_bshd, chunk_size=chunk_size, top_k=top_k, score=score, scale=scale, query_offset=query_offset
    )
    scores_bhtn = chunk_scores(q_bthd, k_bshd, chunk_size=chunk_size, score=score, scale=scale)
    bound_bhtn = ROUNDING[score] * _bounds(q_bthd, _chunk_key_norms(k_bshd, chunk_size, score))
    if score == "exact_lse":
        bound_bhtn = bound_bhtn * scale + ROUNDING[score]  # rounding of the logarithm
    own_t11 = (query_positions(q_bthd, query_offset) // chunk_size)[:, None, None]
    is_valid_bthm = ((chosen_bthm >= 0) == (best_bthm >= 0)) & (chosen_bthm < own_t11) & _distinct(chosen_bthm)
    return _compare(scores_bhtn, bound_bhtn, chosen_bthm, best_bthm, is_valid_bthm)


def compare_elements(q_bthd: Tensor, k_bshd: Tensor, chosen_bthm: Tensor, query_offset: int) -> ChoiceComparison:
    """Compare selected keys, [b, tq, hq, 1], with the best by q.k, in float64."""
    products_bhts = query_key_products(q_bthd, k_bshd)
    best_bht = select_elements(products_bhts, causal_mask(q_bthd, k_bshd, query_offset))
    bound_bhts = ROUNDING["exact"] * _bounds(q_bthd, k_bshd.norm(dim=-1))
    is_valid_bthm = (chosen_bthm >= 0) & (chosen_bthm <= query_positions(q_bthd, query_offset)[:, None, None])
    return _compare(products_bhts, bound_bhts, chosen_bthm, best_bht.transpose(1, 2)[..., None], is_valid_bthm)


def _compare(
    scores_bhtn: Tensor, bound_bhtn: Tensor, chosen_bthm: Tensor, best_bthm: Tensor, is_valid_bthm: Tensor
) -> ChoiceComparison:
    taken_bthm = chosen_bthm.where(is_valid_bthm, best_bthm)
    difference = (_gather_scores(scores_bhtn, best_bthm) - _gather_scores(scores_bhtn, taken_bthm)).abs()
    allowed = torch.maximum(_gather_scores(bound_bhtn, best_bthm), _gather_scores(bound_bhtn, taken_bthm))
    relative = torch.where(taken_bthm == best_bthm, 0.0, difference / allowed)
    wrong = ~is_valid_bthm | ~(relative <= 1)  # so that NaN is wrong
    different, impossible = chosen_bthm != best_bthm, int((~is_valid_bthm).sum())
    return ChoiceComparison(
        chosen_bthm.numel(), int(different.sum()), int(wrong.sum()), impossible, float(relative.max())
    )


def _gather_scores(x_bhtn: Tensor, index_bthm: Tensor) -> Tensor:
    """Return the values at the choices. A column is added, because there may be no chunks."""
    padded = torch.nn.functional.pad(x_bhtn, (0, 1))
    return padded.gather(3, index_bthm.clamp(min=0).transpose(1, 2)).transpose(1, 2)


def _distinct(chosen_bthm: Tensor) -> Tensor:
    """Return True where a query selected a chunk only once; -1 may occur repeatedly."""
    is_repeated = (chosen_bthm[..., :, None] == chosen_bthm[..., None, :]).sum(-1) > 1
    return ~is_repeated | (chosen_bthm < 0)


def _chunk_key_norms(k_bshd: Tensor, chunk_size: int, score: str) -> Tensor:
    """Return the norm of each complete chunk's mean key ("approx") or longest key: [b, n, hkv]."""
    complete = k_bshd.shape[1] // chunk_size
    k_bncgd = k_bshd[:, : complete * chunk_size].unflatten(1, (complete, chunk_size))
    return k_bncgd.mean(2).norm(dim=-1) if score == "approx" else k_bncgd.norm(dim=-1).amax(2)


def _bounds(q_bthd: Tensor, norm_bng: Tensor) -> Tensor:
    """Return |q| |k| for every query and key or chunk: [b, hq, t, n]."""
    norm_bhn = norm_bng.transpose(1, 2).repeat_interleave(q_bthd.shape[2] // norm_bng.shape[2], dim=1)
    return q_bthd.norm(dim=-1).transpose(1, 2)[..., None] * norm_bhn[:, :, None]
