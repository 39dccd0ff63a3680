import sys

import pytest

from megatron_ext.utils.markdown import csv_row, table
from megatron_ext.utils.printable import control_characters, escaped_output, printable, text_output


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


def test_keep_folder():
    assert printable("a\n\x1bb", keep="\n") == "a\n\\x1bb"
    assert control_characters("a\n\x1bb") == "\n\x1b"


def test_escaped_output(capsys):
    with escaped_output():
        print("a\x1b]0;title\x07b", "\ud800", "tab\tline")
        print("\rbar\x1b[A\x1b[31m", file=sys.stderr)
        sys.stdout.writelines(["x\x1b", "y"])
        print("model\x1b[1m", file=text_output())  # the output is not a terminal
        assert sys.stdout.encoding
    out, err = capsys.readouterr()
    assert out == "a\\x1b]0;title\\x07b \\ud800 tab\tline\nx\\x1bymodel\x1b[1m\n"
    assert err == "\rbar\x1b[A\\x1b[31m\n"


def test_text_is_escaped_on_a_screen(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with escaped_output():
        print("model\x1b[1m", file=text_output())
    assert capsys.readouterr().out == "model\\x1b[1m\n"


def test_tables_and_spreadsheets():
    assert table(["a"], [["x\x1b[31m|\ny"]])[2] == "| x\\x1b[31m\\| y |"
    cells = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "-1.5e-3", "+3", "name", -4, 2.5, "\x1b", "-inf", ""]
    safe = ["'=cmd|' /C calc'!A0", "'+1+1", "'-2+3", "'@SUM(A1)", "-1.5e-3", "+3", "name", -4, 2.5, "\\x1b", "-inf", ""]
    assert csv_row(cells) == safe
