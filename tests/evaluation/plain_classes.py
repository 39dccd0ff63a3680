"""Classes of tokens by a plain loop over tokens and characters, from the definitions in `docs/token_classes.md`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise

UNREADABLE = "\ufffd"


def classes(
    tokens: Sequence[int],
    starts: Collection[int],
    texts: Sequence[str],
    special: Collection[int],
    end_id: int,
    counts: Sequence[int] | None,
) -> list[set[str]]:
    """Return the names of the classes of each token of a window after the first one."""
    found: list[set[str]] = []
    groups = None if counts is None else frequencies(counts)
    documents: list[list[int]] = []
    for index, token in enumerate(tokens):
        if index == 0 or index in starts:
            documents.append([])
        context = documents[-1]
        names = {"token/seen" if token in context else "token/unseen"}
        pairs = list(pairwise(context))
        is_repeated = bool(context) and (context[-1], token) in pairs
        names.add("bigram/repeated" if is_repeated else "bigram/new")
        names.add(_text_class(token, context, texts, special, end_id))
        names.add(f"position/{_bucket(len(context))}")
        if groups is not None:
            names.add(f"training/{groups[token]}")
            if is_repeated and groups[token] != "frequent":
                names.add("recall/hit")
        names |= _bracket_class(
            token, context, ["" if t in special or t == end_id else texts[t] for t in range(len(texts))]
        )
        found.append(names)
        context.append(token)
    index = 0
    for document in documents:
        for position in range(len(document)):
            if len(document) > 2000:
                if 45 <= position <= 55:
                    found[index].add("score/50")
                if 1952 <= position <= 2048:
                    found[index].add("score/2000")
            index += 1
    return found[1:]


def frequencies(counts: Sequence[int]) -> list[str]:
    """Return rare, medium or frequent for each token."""
    total, covered, limits = sum(counts), 0, {}
    for count in sorted(counts, reverse=True):
        covered += count
        for share in (0.5, 0.9):
            if covered >= share * total:
                limits.setdefault(share, count)
    return ["frequent" if count >= limits[0.5] else "rare" if count < limits[0.9] else "medium" for count in counts]


def _text_class(token: int, context: Sequence[int], texts: Sequence[str], special: Collection[int], end_id: int) -> str:
    text = texts[token]
    if token == end_id:
        return "text/end_of_document"
    if token in special or text == "" or UNREADABLE in text:
        return "text/other"
    if any(character.isalpha() for character in text):
        before = texts[context[-1]] if context and context[-1] not in (*special, end_id) else " "
        first = text[1] if text[0] in "'\u2019" and len(text) > 1 else text[0]
        if not first.isalpha():
            return "text/word_start"
        if before.endswith(UNREADABLE):
            return "text/other"
        return "text/word_continuation" if before[-1:].isalpha() else "text/word_start"
    if any(character.isdigit() for character in text):
        return "text/digits"
    return "text/space" if text.isspace() else "text/punctuation"


def _bracket_class(token: int, context: Sequence[int], texts: Sequence[str]) -> set[str]:
    unmatched = {}
    for kind in ("()", "[]", "{}"):
        opened = 0
        for before in context:
            for character in texts[before]:
                opened = opened + 1 if character == kind[0] else max(0, opened - (character == kind[1]))
        inside = 0
        for offset, character in enumerate(texts[token]):
            if character == kind[0]:
                inside += 1
            elif character == kind[1] and inside:
                inside -= 1
            elif character == kind[1]:
                unmatched.setdefault(offset, opened > 0)
    if not unmatched:
        return set()
    return {"closing_bracket/open" if unmatched[min(unmatched)] else "closing_bracket/not_open"}


def _bucket(position: int) -> str:
    if position < 3:
        return str(position)
    high = 4
    while high < position:
        high *= 2
    return f"{high // 2 + 1}-{high}"
