from __future__ import annotations

import pytest

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.utils.errors import UserError


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("attention", ["attention"]),
        ("attention*3", ["attention"] * 3),
        ("a,b", ["a", "b"]),
        ("(top1_chunk*3,attention)*2", ["top1_chunk", "top1_chunk", "top1_chunk", "attention"] * 2),
        (" ( a , b * 2 ) * 2 , c ", ["a", "b", "b", "a", "b", "b", "c"]),
        ("((a*2,b)*2,c)*2", ["a", "a", "b", "a", "a", "b", "c"] * 2),
        ("(a)", ["a"]),
    ],
)
def test_expands(pattern: str, layers: list[str]) -> None:
    assert parse_pattern(pattern) == layers


@pytest.mark.parametrize(
    ("pattern", "position", "expected"),
    [
        ("", 1, "expected a mixer's name"),
        ("attention*", 11, "number of repeats"),
        ("attention*0", 11, "number of repeats"),
        ("attention*x", 11, "number of repeats"),
        ("attention*-1", 11, "unexpected character"),
        ("attention,", 11, "expected a mixer's name"),
        ("(attention", 11, "expected ',' or ')'"),
        ("attention)", 10, "expected ',' or '*' or the end"),
        ("3*attention", 1, "expected a mixer's name"),
        ("attention attention", 11, "expected ',' or '*'"),
        ("a;b", 2, "unexpected character"),
        ("attention*99999", 11, "more than 10000 layers"),
        ("(a*9000)*" + "9" * 5000, 10, "more than 10000 layers"),
        ("a*6000,a*6000", 14, "more than 10000 layers"),
        ("(" * 30 + "a" + ")" * 30, 21, "nested deeper"),
    ],
)
def test_pattern_errors_have_positions(pattern: str, position: int, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_pattern(pattern)
    assert caught.value.where == "model.pattern"
    assert f"at position {position} " in caught.value.problem
    assert expected in caught.value.problem
    assert '"(top1_chunk*3,attention)*4"' in caught.value.hint
