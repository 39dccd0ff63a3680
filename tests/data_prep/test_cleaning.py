import pickle
import sys
import unicodedata

import pytest
from datatrove.data import Document

from data_prep.cleaning import Clean, CleaningOptions
from megatron_ext.utils.errors import UserError


def cleaned(*texts: str, **options: object) -> tuple[list[str], dict[str, float]]:
    """Return the remaining texts, and all counts by reason."""
    step = Clean(CleaningOptions(**options))
    documents = [Document(text, f"a.jsonl:{i}") for i, text in enumerate(texts, 1)]
    left = [document.text for document in step.run(documents)]
    return left, {name: metric.total for name, metric in step.stats.stats.items() if name != "doc_len"}


def test_clean_text_is_unchanged():
    texts = ["plain\ttext\n", "naïve 東京 λ→μ\n\n  indented", "👩‍👩‍👧 \u200b zero width stays"]
    assert cleaned(*texts) == (texts, {"total": 3, "forwarded": 3})


@pytest.mark.parametrize(
    ("text", "expected", "counts"),
    [
        ("a\r\nb\rc\n\rd", "a\nb\nc\n\nd", {"changed_line_ends": 1}),
        ("page\x0cpage\x0bline", "page\npage\nline", {"changed_line_ends": 1}),
        ("e\u0301te\u0301", "été", {"changed_unicode": 1}),
        ("a\x00b\x00", "ab", {"changed_nul": 1, "removed_nul": 2}),
        ("one\x85two", "one\ntwo", {"changed_line_ends": 1}),
        ("\x1b[31mred\x7f\x9f", "[31mred", {"changed_controls": 1, "removed_controls": 3}),
    ],
)
def test_changes_are_counted_by_reason(text, expected, counts):
    left, found = cleaned(text)
    assert left == [expected]
    assert found == {"total": 1, "forwarded": 1, "changed": 1, **counts}


def test_control_characters_are_removed():
    controls = [chr(c) for c in range(sys.maxunicode + 1) if unicodedata.category(chr(c)) == "Cc"]
    assert len(controls) == 65
    (left,), counts = cleaned("x" + "".join(controls) + "y")
    assert {c for c in left if unicodedata.category(c) == "Cc"} == {"\t", "\n"}
    # LF, CR, VT, FF and U+0085 are line ends: each becomes a newline.
    assert left == "x\t\n\n\n\n\ny"
    assert counts["removed_nul"] + counts["removed_controls"] == 65 - 6


def test_normalization_follows_the_removal_of_controls():
    assert cleaned("e\x01\u0301")[0] == ["é"]


def test_empty_documents_are_dropped():
    left, counts = cleaned("\x00\x01", " \r\n\t", "text")
    assert left == ["text"]
    assert counts["dropped"] == counts["dropped_empty"] == 2
    assert counts["total"] == 3


def test_documents_with_nul_can_be_dropped():
    left, counts = cleaned("a\0b", "text", nul="drop")
    assert left == ["text"]
    assert counts == {"total": 2, "forwarded": 1, "dropped": 1, "dropped_nul": 1}


def test_nul_stop_names_the_document():
    with pytest.raises(UserError, match=r"a\.jsonl:2: the text contains a NUL"):
        cleaned("text", "a\0b", nul="stop")


def test_each_option_can_be_disabled():
    text = "e\u0301\r\n\x01"
    assert cleaned(text, unicode_form=None, line_ends=False, controls=False)[0] == [text]
    assert cleaned("ﬁ", unicode_form="NFKC")[0] == ["fi"]


def test_step_can_be_pickled():
    step = pickle.loads(pickle.dumps(Clean()))
    assert [document.text for document in step.run([Document("a\r\n", "1")])] == ["a\n"]
