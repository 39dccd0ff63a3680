"""Beam search: several continuations of a text are extended in parallel; the best mean log-probability wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EXCLUDED_SCORE = -1e9
"""Score of a candidate that must not be chosen. It is finite, so that `topk` always finds enough candidates."""


class Beams:
    """Beams of one text; the search equals `generate` of transformers with `num_beams` and otherwise default options.

    Each step takes the 2 * `num_beams` most likely one-token extensions over all beams. Extensions that end become
    finished texts. The search keeps the `num_beams` finished texts with the best log-probability per token. The most
    likely other extensions are the beams of the next step.

    The search stops when no beam has a better log-probability per token than the worst finished text. It also stops
    when the most likely extension is done, as with the stop texts of lm-eval. All other extensions are then cut off at
    the same length.

    Args:
        num_beams: number of beams, at least 2.
        max_tokens: maximum tokens of a continuation.
        end: token that ends a continuation.
        is_done: stopping criterion, called with the tokens of a continuation, including `end`.

    Attributes:
        is_open: whether the search continues.
    """

    def __init__(self, num_beams: int, max_tokens: int, end: int, is_done: Callable[[Sequence[int]], bool]) -> None:
        self.num_beams, self._max_tokens, self._end, self._is_done = num_beams, max_tokens, end, is_done
        self._running: list[list[int]] = [[]] * num_beams
        # All beams are equal at first, so only one counts.
        self._scores_n = torch.tensor([0.0] + [EXCLUDED_SCORE] * (num_beams - 1))
        self._finished: list[list[int]] = [[]] * num_beams
        self._finished_scores_n = torch.full((num_beams,), EXCLUDED_SCORE)
        self.is_open = True

    @property
    def best(self) -> list[int]:
        """Best finished text, without its `end` token."""
        tokens = self._finished[0]
        return tokens[:-1] if tokens and tokens[-1] == self._end else tokens

    def advance(self, logits_nv: Tensor) -> tuple[list[int], list[int]]:
        """Extend the beams by one token.

        Args:
            logits_nv: next-token logits of each beam, [num_beams, v]. In the first step all rows are equal.

        Returns:
            For each new beam, the index of the beam that it extends and its new token. Both are meaningless if
            `is_open` is now False.
        """
        n, v = logits_nv.shape
        scores_nv = logits_nv.float().log_softmax(-1) + self._scores_n.to(logits_nv.device)[:, None]
        top = scores_nv.flatten().topk(2 * n)
        scores_m, flat_indices = top.values.cpu(), top.indices.tolist()
        texts = [[*self._running[flat_index // v], flat_index % v] for flat_index in flat_indices]
        all_end = len(texts[0]) == self._max_tokens or self._is_done(texts[0])
        ends_m = torch.tensor([all_end or text[-1] == self._end for text in texts])
        self._update_finished(texts, scores_m, ends_m)
        running = (scores_m + EXCLUDED_SCORE * ends_m).topk(n)
        self._running, self._scores_n = [texts[index] for index in running.indices], running.values
        has_free_slot = bool((self._finished_scores_n <= EXCLUDED_SCORE / 2).any())
        can_improve = has_free_slot or bool(self._scores_n[0] / len(texts[0]) > self._finished_scores_n[-1])
        self.is_open = can_improve and not bool(ends_m.all())
        return [flat_indices[index] // v for index in running.indices], [text[-1] for text in self._running]

    def _update_finished(self, texts: list[list[int]], scores_m: Tensor, ends_m: Tensor) -> None:
        """Keep the best of the finished texts and of those that end among the `num_beams` most likely candidates."""
        is_eligible_m = ends_m & (torch.arange(len(texts)) < self.num_beams)
        finished_m = scores_m / len(texts[0]) + EXCLUDED_SCORE * ~is_eligible_m
        best = torch.cat([self._finished_scores_n, finished_m]).topk(self.num_beams)
        all_texts = [*self._finished, *texts]
        self._finished, self._finished_scores_n = [all_texts[index] for index in best.indices], best.values
