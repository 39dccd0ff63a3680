"""Classes of tokens, compared with a plain loop over tokens and characters."""

from __future__ import annotations

import numpy as np
import plain_classes
import pytest

from megatron_ext.evaluation.token_classes.classifier import TokenClassifier, position_buckets
from megatron_ext.evaluation.token_classes.vocabulary import frequency_groups, token_table

END, SPECIAL, PART = 0, 1, "\ufffd"
TEXTS = [
    *(
        "<|endoftext|>",
        "<|pad|>",
        " the",
        "the",
        "ing",
        "'s",
        "\u2019t",
        " '",
        "-based",
        " 3rd",
        "x2",
        "12",
        " 3.5",
        "\u00b2",
    ),
    *(
        " (",
        ")",
        "),",
        "(x)",
        "](",
        "[",
        "]",
        "})",
        "{",
        "()",
        "))",
        ".",
        " $",
        "\n",
        "\n\n  ",
        "\u00e9",
        PART,
        f"d{PART}",
        "",
    ),
    *(f"{PART}a", " of the", "\u0434\u0430"),
]


def _names(classifier: TokenClassifier, tokens: np.ndarray, starts: np.ndarray) -> list[set[str]]:
    codes = classifier.classify(tokens, starts)
    return [{classifier.names[code] for code in column if code < len(classifier.names)} for column in codes.T]


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("documents", [1, 2, 9])
def test_classes_are_those_of_a_plain_loop(documents: int, counted: bool) -> None:
    random = np.random.default_rng(documents)
    counts = random.zipf(1.3, len(TEXTS)).clip(max=10**6) * (random.random(len(TEXTS)) > 0.2)
    table = token_table(TEXTS, {SPECIAL}, END, counts if counted else None)
    tokens = random.integers(len(TEXTS), size=160)
    starts = np.sort(random.choice(np.arange(1, 160), documents - 1, replace=False))
    expected = plain_classes.classes(
        tokens.tolist(), starts.tolist(), TEXTS, {SPECIAL}, END, counts.tolist() if counted else None
    )
    assert _names(TokenClassifier(table, 160), tokens, starts) == expected


def test_tokens_of_the_in_context_score() -> None:
    """Only documents with more than 2,000 tokens in the window count, also in the loss of early tokens."""
    classifier = TokenClassifier(token_table(["a", "b"], set(), None), 4096)
    tokens = np.zeros(4097, dtype=np.int64)
    for starts, expected in (
        ([7], {"score/50": range(7 + 45, 7 + 56), "score/2000": range(7 + 1952, 7 + 2049)}),
        ([2001, 4000], {"score/50": range(45, 56), "score/2000": range(1952, 2001)}),
        ([7, 2007, 2100], {"score/50": (), "score/2000": ()}),
    ):
        names = _names(classifier, tokens, np.array(starts))
        for name, indices in expected.items():
            assert [index for index, found in enumerate(names, start=1) if name in found] == list(indices)


def test_buckets_of_positions() -> None:
    names, edges = position_buckets(16)
    assert names == [f"position/{name}" for name in ("0", "1", "2", "3-4", "5-8", "9-16")]
    assert np.searchsorted(edges, np.arange(17)).tolist() == [0, 1, 2, 3, 3, *[4] * 4, *[5] * 8]


def test_frequent_and_rare_tokens_by_shares_of_the_text() -> None:
    counts = np.array([0, 40, 20, 20, 5, 5, 4, 4, 2])
    assert ["RMF"[group] for group in frequency_groups(counts)] == list("RFFFMMRRR")
    assert set(frequency_groups(np.array([3, 3])).tolist()) == {2}
