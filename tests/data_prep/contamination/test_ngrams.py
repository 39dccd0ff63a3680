import random
import string
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import xxhash

from data_prep.contamination.ngrams import split_words, window_hashes


def words_char_by_char(text: str) -> list[str]:
    words, word = [], ""
    for c in text.lower() + " ":
        if c.isspace():
            words, word = words + ([word] if word else []), ""
        elif not (unicodedata.category(c).startswith("P") or c in string.punctuation):
            word += c
    return words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The Cat, the  DOG.\n\tEnd", ["the", "cat", "the", "dog", "end"]),
        ("don't well-known a_b 3.14 x^2", ["dont", "wellknown", "ab", "314", "x2"]),
        ("one — two - three … “four”", ["one", "two", "three", "four"]),
        ("Ünïcode ¿qué? 東京、大阪。 nb\u00a0space", ["ünïcode", "qué", "東京大阪", "nb", "space"]),
        ("… -- !", []),
        ("", []),
    ],
)
def test_words(text, words):
    assert split_words(text) == words == words_char_by_char(text)


def test_words_equal_the_definition():
    generator = random.Random(1)
    characters = [chr(c) for c in range(0x3100) if not 0xD800 <= c < 0xE000]
    for pool in (characters, characters[:128]):
        for _ in range(300):
            text = "".join(generator.choices(pool, k=60)) + " a" * 3
            assert split_words(text) == words_char_by_char(text)


def test_equal_hashes_mean_equal_ngrams():
    words = random.Random(2).choices(["a", "b", "c"], k=3000)
    for n in (1, 2, 13):
        runs = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        hashes = window_hashes(words, n).tolist()
        assert len(hashes) == len(runs)
        assert len(set(zip(runs, hashes, strict=True))) == len(set(runs)) == len(set(hashes))


@pytest.mark.parametrize(("number", "windows"), [(0, 0), (1, 0), (12, 0), (13, 1), (14, 2)])
def test_number_of_windows(number, windows):
    assert window_hashes(["é"] * number, 13).shape == (windows,)


def test_hashes_are_a_polynomial_the_same_in_every_process():
    words = ["die", "schöne", "müllerin"]
    expected = 0
    for word in words:
        expected = (expected * 0x9E3779B97F4A7C15 + xxhash.xxh3_64_intdigest(word.encode())) % 2**64
    assert window_hashes(words, 3) == np.array([expected], np.uint64)
    code = f"from data_prep.contamination.ngrams import window_hashes; print(window_hashes({words!r}, 3)[0])"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(there.stdout) == expected
