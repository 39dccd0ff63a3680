"""Beam search: several continuations of a text grow side by side, and the likeliest by token is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NEVER = -1e9
"""Score of what is not to be taken; a number, so that there are always as many candidates as are asked for."""


class Beams:
    """The beams of one text, as transformers' `generate` searches with `num_beams` and its defaults otherwise.

    Each step takes the 2 * `num_beams` likeliest continuations of all beams by a token. Of those that end, the
    `num_beams` best by their log-probability a token are kept; the likeliest others are the beams of the next step. The
    search ends where no beam is likelier a token than the worst that is kept, and, as with lm-eval's stop texts, where
    the likeliest continuation is done: the others are cut off there, too.

    Args:
        num_beams: how many, at least 2.
        max_tokens: of a continuation, at most.
        end: token that ends one.
        is_done: told the tokens of a continuation, `end` included, whether that is enough.

    Attributes:
        is_open: whether the search goes on.
    """

    def __init__(self, num_beams: int, max_tokens: int, end: int, is_done: Callable[[Sequence[int]], bool]) -> None:
        self.num_beams, self._max_tokens, self._end, self._is_done = num_beams, max_tokens, end, is_done
        self._running: list[list[int]] = [[]] * num_beams
        self._scores_n = torch.tensor([0.0] + [NEVER] * (num_beams - 1))  # all are the same text yet: one counts
        self._kept: list[list[int]] = [[]] * num_beams
        self._kept_scores_n = torch.full((num_beams,), NEVER)
        self.is_open = True

    @property
    def best(self) -> list[int]:
        """The best of those that have ended, without the token that ends it."""
        tokens = self._kept[0]
        return tokens[:-1] if tokens and tokens[-1] == self._end else tokens

    def advance(self, logits_nv: Tensor) -> tuple[list[int], list[int]]:
        """Take a step.

        Args:
            logits_nv: of what follows each beam; before the first step all are the same.

        Returns:
            The beams that go on, by their numbers before this step, and the next token of each. Without a meaning where
            `is_open` is now false.
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
        """Keep the best of those that end among the `num_beams` likeliest, and of those that are kept."""
        may_be_kept_m = ends_m & (torch.arange(len(texts)) < self.num_beams)
        ended_m = scores_m / len(texts[0]) + NEVER * ~may_be_kept_m
        best = torch.cat([self._kept_scores_n, ended_m]).topk(self.num_beams)
        all_texts = [*self._kept, *texts]
        self._kept, self._kept_scores_n = [all_texts[number] for number in best.indices], best.values
