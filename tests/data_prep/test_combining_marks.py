import random
import sys
import time
import unicodedata

import pytest

from data_prep import combining_marks
from data_prep.combining_marks import MAX_RUN_LENGTH, is_mark, normalize

MARKS = "\u0301\u0323\u0344\u0f71\u0f73\u0f81\u3099\u094d\u1dce\U0001d165"
STARTERS = "aé\u1100\u1161が\ufb2c\u0958ﬁ\u0f40ñ "


def test_bounds_contain_all_marks():
    assert ord(next(filter(is_mark, map(chr, range(sys.maxunicode + 1))))) >= combining_marks._FIRST
    assert not any(is_mark(chr(point)) for point in range(combining_marks._LAST + 1, sys.maxunicode + 1))


@pytest.mark.parametrize("form", ["NFC", "NFKC"])
def test_equals_the_standard_library(form):
    dice = random.Random(0)
    for _ in range(200):
        text = "".join(
            dice.choice(STARTERS)
            + "".join(dice.choices(MARKS, k=dice.choice([0, 1, MAX_RUN_LENGTH, MAX_RUN_LENGTH + 1, 99])))
            for _ in range(4)
        )
        assert normalize(text, form) == unicodedata.normalize(form, text)


@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73\u0f71", "\u0344\u0323", "\u0301"])
def test_time_is_linear_in_the_marks(marks):
    """The standard library needs a hundred times as long for the first three."""

    def seconds(length):
        text, best = "e\u0301" + marks * length, 1e9
        for _ in range(3):
            start = time.thread_time()
            normalize(text, "NFC")
            best = min(best, time.thread_time() - start)
        return best

    assert seconds(50_000) < 40 * max(seconds(5_000), 1e-4)
