"""Values in messages: the text is short, and the time to make it is proportional to its length."""

from __future__ import annotations

from argparse import Namespace
from datetime import date
from typing import Any

import pytest

from megatron_ext.config.validate import show


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a" * 58, '"' + "a" * 58 + '"'),
        ("a" * 59, '"' + "a" * 56 + "..."),
        ([1] * 20, "[" + "1, " * 19 + "1]"),
        ([1] * 21, "[" + "1, " * 18 + "1,..."),
        ({"a": [1, None], 2: 3.5, (3, 4): 5}, '{"a": [1, null], "2": 3.5}'),
        (date(2020, 1, 2), '"datetime.date(2020, 1, 2)"'),
        (b"a" * 1000, "\"b'" + "a" * 54 + "..."),
        (Namespace(a=1), '"<Namespace>"'),
    ],
)
def test_values(value: Any, expected: str) -> None:
    assert show(value) == expected


def test_endless_value_is_shown_quickly() -> None:
    value: Any = [0]
    for _ in range(60):
        value = [value, value]
    assert show(value) == "[" * 57 + "..."
    assert show([1, Namespace(a=value)]) == '[1, "<Namespace>"]'
