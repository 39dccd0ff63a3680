import pytest

from megatron_ext.printable import control_characters, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain Wörter 文 👩‍👩‍👧", "plain Wörter 文 👩‍👩‍👧"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b2J", r"\x9b2J"),
        ("abc\u202etxt.exe", r"abc\u202etxt.exe"),
        ("\u2028\u2029\u2066", r"\u2028\u2029\u2066"),
        ("\ud800", r"\ud800"),
        ("no\u00a0break, soft\u00adhyphen, back\\slash", "no\u00a0break, soft\u00adhyphen, back\\slash"),
        ("", ""),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    assert not control_characters(printable(text))


def test_keep():
    assert printable("a\n\x1bb", keep="\n") == "a\n\\x1bb"
    assert control_characters("a\n\x1bb") == "\n\x1b"
