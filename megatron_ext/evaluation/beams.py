"""Beam search: several continuations of a text are extended in parallel; the best mean log-probability wins."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NEVER = -1e9
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
        self._scores_n = torch.tensor([0.0] + [NEVER] * (num_beams - 1))  # beams are equal at first: one counts
        self._kept: list[list[int]] = [[]] * num_beams
        self._kept_scores_n = torch.full((num_beams,), NEVER)
        self.is_open = True

    @property
    def best(self) -> list[int]:
        """Best finished text, without its `end` token."""
        tokens = self._kept[0]
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
        found = scores_nv.flatten().topk(2 * n)
        scores_m, places = found.values.cpu(), found.indices.tolist()
        texts = [[*self._running[place // v], place % v] for place in places]
        all_end = len(texts[0]) == self._max_tokens or self._is_done(texts[0])
        ends_m = torch.tensor([all_end or text[-1] == self._end for text in texts])
        self._keep(texts, scores_m, ends_m)
        going = (scores_m + NEVER * ends_m).topk(n)
        self._running, self._scores_n = [texts[number] for number in going.indices], going.values
        has_room = bool((self._kept_scores_n <= NEVER / 2).any())
        can_improve = has_room or bool(self._scores_n[0] / len(texts[0]) > self._kept_scores_n[-1])
        self.is_open = can_improve and not bool(ends_m.all())
        return [places[number] // v for number in going.indices], [text[-1] for text in self._running]

    def _keep(self, texts: list[list[int]], scores_m: Tensor, ends_m: Tensor) -> None:
        """Keep the best of the kept texts and of those that end among the `num_beams` most likely candidates."""
        may_be_kept_m = ends_m & (torch.arange(len(texts)) < self.num_beams)
        ended_m = scores_m / len(texts[0]) + NEVER * ~may_be_kept_m
        best = torch.cat([self._kept_scores_n, ended_m]).topk(self.num_beams)
        all_texts = [*self._kept, *texts]
        self._kept, self._kept_scores_n = [all_texts[number] for number in best.indices], best.values
