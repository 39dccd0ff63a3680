"""Classes of the predicted tokens of a window. `docs/token_classes.md` defines them in words."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megatron_ext.analysis.token_classes import SCORE_EARLY, SCORE_LATE
from megatron_ext.evaluation.token_classes.vocabulary import (
    BRACKETS,
    DIGITS,
    END_OF_DOCUMENT,
    FREQUENT,
    LETTER,
    MEDIUM,
    PUNCTUATION,
    RARE,
    SPACE,
    UNKNOWN,
    WORD,
    TokenTable,
)

IntArray = npt.NDArray[np.int64]

SCORE_POSITIONS = {SCORE_EARLY: (45, 55), SCORE_LATE: (1952, 2048)}
"""First and last position of the classes whose losses make up the in-context score: 50 and 2,000 with a margin."""

SCORE_LENGTH = 2000
"""Context that a document must reach in a window to count in the in-context score, both early and late."""

SEEN, UNSEEN = "token/seen", "token/unseen"
REPEATED, NEW = "bigram/repeated", "bigram/new"
RECALL = "recall/hit"
WORD_START, WORD_CONTINUATION = "text/word_start", "text/word_continuation"
KINDS = {
    DIGITS: "text/digits",
    PUNCTUATION: "text/punctuation",
    SPACE: "text/space",
    END_OF_DOCUMENT: "text/end_of_document",
}
OTHER_TEXT = "text/other"
OPEN, NOT_OPEN = "closing_bracket/open", "closing_bracket/not_open"
FREQUENCIES = {RARE: "training/rare", MEDIUM: "training/medium", FREQUENT: "training/frequent"}


class TokenClassifier:
    """Classifier of predicted tokens.

    The context of a token is the tokens of its document before it in the window. This holds without
    `data.reset_attention` too, although the model then also reads the documents before.

    Args:
        table: properties of the vocabulary.
        seq_length: T, input tokens per window.

    Attributes:
        names: name of each class, `group/class`. A token has at most one class of each group.
    """

    def __init__(self, table: TokenTable, seq_length: int) -> None:
        self._table = table
        positions, self._edges = position_buckets(seq_length)
        text = (WORD_START, WORD_CONTINUATION, *KINDS.values(), OTHER_TEXT)
        training = () if table.frequencies is None else (RECALL, *FREQUENCIES.values())
        self.names = (
            *(SEEN, UNSEEN, REPEATED, NEW, *training, *text, OPEN, NOT_OPEN),
            *positions,
            *SCORE_POSITIONS,
        )
        self._index = {name: index for index, name in enumerate(self.names)}
        self._first_position = self._index[positions[0]]

    def classify(self, tokens_n: IntArray, starts: IntArray) -> IntArray:
        """Return the classes of the predicted tokens of one window.

        Args:
            tokens_n: int64 [n + 1], tokens of the window without padding. The first one is only an input.
            starts: int64, ascending offsets in `tokens_n` of the first tokens of documents.

        Returns:
            Classes, int64 [groups, n]: indices in `names`; `len(names)` if the token has no class of the group.
        """
        is_start_n = np.zeros(len(tokens_n), dtype=np.bool_)
        is_start_n[0] = is_start_n[starts] = True
        first_offsets = np.flatnonzero(is_start_n)
        pieces_n = np.cumsum(is_start_n) - 1
        positions_n = np.arange(len(tokens_n)) - first_offsets[pieces_n]
        lengths = np.diff(np.append(first_offsets, len(tokens_n)))
        is_long_n = (lengths > SCORE_LENGTH)[pieces_n]
        is_repeated_n = self._is_repeated_bigram(tokens_n, pieces_n, positions_n)
        groups = [
            self._choose(_is_repeated(pieces_n * self._table.size + tokens_n), SEEN, UNSEEN),
            self._choose(is_repeated_n, REPEATED, NEW),
            self._text(tokens_n, positions_n),
            self._brackets(tokens_n, pieces_n),
            self._first_position + np.searchsorted(self._edges, positions_n),
            self._score(positions_n, is_long_n),
        ]
        if self._table.frequencies is not None:
            frequencies_n = self._table.frequencies[tokens_n]
            groups.append(self._map(FREQUENCIES)[frequencies_n])
            groups.append(self._choose(is_repeated_n & (frequencies_n != FREQUENT), RECALL, None))
        return np.stack(groups)[:, 1:]

    def _choose(self, condition: npt.NDArray[np.bool_], name: str, other: str | None) -> IntArray:
        return np.where(condition, self._index[name], len(self.names) if other is None else self._index[other])

    def _map(self, names: dict[int, str]) -> IntArray:
        return np.array([self._index[names[key]] for key in sorted(names)])

    def _is_repeated_bigram(
        self, tokens_n: IntArray, pieces_n: IntArray, positions_n: IntArray
    ) -> npt.NDArray[np.bool_]:
        """Return whether the previous token and this one occurred together earlier in the context."""
        is_repeated_n = np.zeros(len(tokens_n), dtype=np.bool_)
        ends = np.flatnonzero(positions_n > 0)
        size = self._table.size
        is_repeated_n[ends] = _is_repeated((pieces_n[ends] * size + tokens_n[ends - 1]) * size + tokens_n[ends])
        return is_repeated_n

    def _text(self, tokens_n: IntArray, positions_n: IntArray) -> IntArray:
        other = self._index[OTHER_TEXT]
        by_kind = np.full(256, other)
        for kind, name in KINDS.items():
            by_kind[kind] = self._index[name]
        classes_n = by_kind[self._table.kinds[tokens_n]]
        previous_n = np.roll(self._table.ends[tokens_n], 1)
        joins_n = self._table.joins_left[tokens_n] & (positions_n > 0)
        word_n = np.where(
            joins_n & (previous_n == LETTER), self._index[WORD_CONTINUATION], self._index[WORD_START]
        )  # after a part of a character, it is not known whether a word continues
        word_n[joins_n & (previous_n == UNKNOWN)] = other
        return np.where(self._table.kinds[tokens_n] == WORD, word_n, classes_n)

    def _brackets(self, tokens_n: IntArray, pieces_n: IntArray) -> IntArray:
        classes_n = np.full(len(tokens_n), len(self.names))
        closes_n = self._table.closes[tokens_n]
        for bracket in range(len(BRACKETS)):
            closing_n, opening_n = self._table.closing[bracket, tokens_n], self._table.opening[bracket, tokens_n]
            found = np.flatnonzero((closing_n > 0) | (opening_n > 0))
            if len(found):
                depths = open_brackets(closing_n[found], opening_n[found], pieces_n[found])
                is_first = closes_n[found] == bracket
                classes_n[found[is_first]] = self._choose(depths[is_first] > 0, OPEN, NOT_OPEN)
        return classes_n

    def _score(self, positions_n: IntArray, is_long_n: npt.NDArray[np.bool_]) -> IntArray:
        classes_n = np.full(len(positions_n), len(self.names))
        for name, (first, last) in SCORE_POSITIONS.items():
            classes_n[is_long_n & (positions_n >= first) & (positions_n <= last)] = self._index[name]
        return classes_n


def position_buckets(seq_length: int) -> tuple[list[str], IntArray]:
    """Return names and upper bounds of the buckets of positions: 0, 1, 2, 3-4, 5-8, ... up to `seq_length`."""
    edges = [0, 1]
    while edges[-1] < seq_length:
        edges.append(2 * edges[-1])
    names = [str(edge) if edge < 3 else f"{edge // 2 + 1}-{edge}" for edge in edges]
    return [f"position/{name}" for name in names], np.array(edges)


def _is_repeated(keys: IntArray) -> npt.NDArray[np.bool_]:
    """Return whether the same key occurs earlier in the array."""
    is_repeated = np.ones(len(keys), dtype=np.bool_)
    is_repeated[np.unique(keys, return_index=True)[1]] = False
    return is_repeated


def open_brackets(
    closing: npt.NDArray[np.int16], opening: npt.NDArray[np.int16], pieces: IntArray
) -> npt.NDArray[np.int64]:
    """Return the number of open brackets before each token, int64 [n], counted from 0 in each piece of a document.

    A closing bracket without an open one is ignored. The count is then a sum of steps that is reflected at 0: the sum
    less its lowest value below 0 so far.

    Args:
        closing: int16 [n], closing brackets at the beginning of each token.
        opening: int16 [n], opening brackets after them.
        pieces: int64 [n], ascending number of the piece of each token.
    """
    steps = np.stack([-closing.astype(np.int64), opening.astype(np.int64)], axis=1).ravel()
    sums, pieces = np.cumsum(steps), np.repeat(pieces, 2)
    first = np.searchsorted(pieces, pieces)
    sums -= np.append(0, sums)[first]
    # Each piece's values lie below those of the pieces before, so that one running minimum serves all pieces.
    offset = pieces * (int(np.abs(steps).sum()) + 1)
    lowest = np.minimum.accumulate(np.minimum(sums, 0) - offset) + offset
    depths = (sums - lowest)[1::2]
    is_first = first[::2] == np.arange(0, len(first), 2)
    return np.where(is_first, 0, np.append(0, depths[:-1]))
