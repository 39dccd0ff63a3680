"""The fields of a foreign configuration, read one by one, each refused by name where it is nothing for us."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.pattern import MAX_LAYERS
from megatron_ext.config.validate import show
from megatron_ext.errors import UserError


def where(name: str) -> str:
    """A field of config.json as a message names it."""
    return f"config.json: {name}"


@dataclass(frozen=True)
class Fields:
    """Fields of a config.json, or of something like it.

    Attributes:
        given: what it says.
        defaults: what its architecture takes where it says nothing.
        prefix: what messages name before a field.
        mend: what can be done where a field is missing.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    prefix: str = where("")
    mend: str = "give it a value; it has no default"

    def where(self, name: str) -> str:
        """A field as a message names it."""
        return f"{self.prefix}{name}"

    def __getitem__(self, name: str) -> Any:
        """The field, or its default.

        Raises:
            UserError: it is missing and has none.
        """
        if name in self.given:
            return self.given[name]
        if name in self.defaults:
            return self.defaults[name]
        raise UserError(self.where(name), "missing", self.mend)

    def whole(self, name: str) -> int:
        """A whole number above 0."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(self.where(name), f"{show(value)} is not a whole number above 0", "give one")
        return value

    def layers(self, name: str) -> int:
        """A number of layers, which a layer pattern may have.

        Raises:
            UserError: it is no whole number above 0, or more than `MAX_LAYERS`.
        """
        value = self.whole(name)
        if value > MAX_LAYERS:
            raise UserError(
                self.where(name), f"{show(value)} is more than {MAX_LAYERS} layers", "give that many at most"
            )
        return value

    def whole_or(self, name: str, other: int) -> int:
        """A whole number above 0; the other one where it is null."""
        return other if self[name] is None else self.whole(name)

    def heads(self, heads: str, groups: str, width: str) -> dict[str, int]:
        """Fields of `ModelConfig` about grouped queries.

        Args:
            heads: the field with the number of query heads.
            groups: with that of keys; null, each head has its own.
            width: with the width of a head; null, all heads are as wide as the model.
        """
        number, hidden = self.whole(heads), self.whole("hidden_size")
        shared = self.whole_or(groups, number)
        self.per(heads, number, groups, shared)
        each = self.per("hidden_size", hidden, heads, number) if self[width] is None else self.whole(width)
        return {"num_attention_heads": number, "num_query_groups": shared, "head_dim": each}

    def number(self, name: str) -> float:
        """A finite number above 0."""
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(self.where(name), f"{show(value)} is not a number above 0", "give one")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false."""
        value = self[name]
        if not isinstance(value, bool):
            raise UserError(self.where(name), f"{show(value)} is not true or false", "give one of them")
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
            raise UserError(
                self.where(name), f"{show(value)}, which no model of ours has", f"only {choices} can be read"
            )

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
        made = "" if self[name] == whole else f" makes {whole:g}, which"
        if times < 1 or not math.isclose(times * of, whole, rel_tol=1e-9):
            raise UserError(
                self.where(name),
                f"{show(self[name])}{made} does not divide by {by} {of}",
                "only a whole number of times can be read",
            )
        return times
