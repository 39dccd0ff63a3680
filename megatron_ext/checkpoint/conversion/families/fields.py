"""The fields of a config.json, read one by one, each refused by name where it is nothing for us."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.validate import show
from megatron_ext.errors import UserError


def where(name: str) -> str:
    """A field of config.json as a message names it."""
    return f"config.json: {name}"


@dataclass(frozen=True)
class Fields:
    """Fields of a config.json.

    Attributes:
        given: what it says.
        defaults: what its architecture takes where it says nothing.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The field, or its default.

        Raises:
            UserError: it is missing and has none.
        """
        if name in self.given:
            return self.given[name]
        if name in self.defaults:
            return self.defaults[name]
        raise UserError(where(name), "missing", "give it a value; it has no default")

    def whole(self, name: str) -> int:
        """A whole number above 0."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(where(name), f"{show(value)} is not a whole number above 0", "give one")
        return value

    def number(self, name: str) -> float:
        """A finite number above 0."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(where(name), f"{show(value)} is not a number above 0", "give one")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self[name]
        if not isinstance(value, bool):
            raise UserError(where(name), f"{show(value)} is not true or false", "give one of them")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Refuse all but what ours can be.

        Raises:
            UserError: the field has another value.
        """
        value = self[name]
        # 0 is False and 1 is True to Python, not to a reader.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            choices = " or ".join(show(one) for one in allowed)
            raise UserError(where(name), f"{show(value)}, which no model of ours has", f"only {choices} can be read")

    def per(self, name: str, whole: float, by: str, of: int) -> int:
        """How many times `of` goes into a number.

        Args:
            name: the field that the number is made with.
            whole: the number.
            by: what `of` is, for the message.
            of: the divisor.

        Raises:
            UserError: not a whole number of times.
        """
        times = round(whole / of)
        if times < 1 or not math.isclose(times * of, whole, rel_tol=1e-9):
            raise UserError(
                where(name),
                f"{show(self[name])} makes {whole:g}, which does not divide by {by} {of}",
                "only a whole number of times can be read",
            )
        return times
