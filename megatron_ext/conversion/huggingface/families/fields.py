"""Validated access to the fields of another library's configuration.

Each error names the field with the unsupported value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.pattern import MAX_LAYERS
from megatron_ext.config.validate import show
from megatron_ext.utils.errors import UserError


def where(name: str) -> str:
    """Return the name of a field of config.json for error messages."""
    return f"config.json: {name}"


@dataclass(frozen=True)
class Fields:
    """Fields of a config.json or of a similar configuration.

    Attributes:
        given: fields that the configuration contains.
        defaults: defaults of the architecture for missing fields.
        prefix: text before a field's name in error messages.
        hint: advice in the error message for a missing field.
    """

    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    prefix: str = where("")
    hint: str = "give it a value; it has no default"

    def where(self, name: str) -> str:
        """Return the name of a field for error messages."""
        return f"{self.prefix}{name}"

    def __getitem__(self, name: str) -> Any:
        """Return the field or its default.

        Raises:
            UserError: the field is missing and has no default.
        """
        if name in self.given:
            return self.given[name]
        if name in self.defaults:
            return self.defaults[name]
        raise UserError(self.where(name), "missing", self.hint)

    def whole(self, name: str) -> int:
        """Return a field that must be an integer above 0.

        Raises:
            UserError: the field has another value.
        """
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(self.where(name), f"{show(value)} is not a whole number above 0", "give one")
        return value

    def layers(self, name: str) -> int:
        """Return a field that must be a number of layers.

        Raises:
            UserError: the field is not an integer above 0, or exceeds `MAX_LAYERS`.
        """
        value = self.whole(name)
        if value > MAX_LAYERS:
            raise UserError(
                self.where(name), f"{show(value)} is more than {MAX_LAYERS} layers", "give at most that many"
            )
        return value

    def whole_or(self, name: str, other: int) -> int:
        """Return a field that must be an integer above 0, or `other` if the field is null."""
        return other if self[name] is None else self.whole(name)

    def heads(self, heads: str, groups: str, width: str) -> dict[str, int]:
        """Return the fields of `ModelConfig` for grouped-query attention.

        Args:
            heads: name of the field with the number of query heads.
            groups: name of the field with the number of key heads; if it is null, each query head has its own key head.
            width: name of the field with the head width; if it is null, the heads together are as wide as the hidden
                size.

        Raises:
            UserError: a number does not divide as it must.
        """
        number, hidden = self.whole(heads), self.whole("hidden_size")
        shared = self.whole_or(groups, number)
        self.per(heads, number, groups, shared)
        each = self.per("hidden_size", hidden, heads, number) if self[width] is None else self.whole(width)
        return {"num_attention_heads": number, "num_query_groups": shared, "head_dim": each}

    def number(self, name: str) -> float:
        """Return a field that must be a finite number above 0.

        Raises:
            UserError: the field has another value.
        """
        value = self[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UserError(self.where(name), f"{show(value)} is not a number above 0", "give one")
        return float(value)

    def flag(self, name: str) -> bool:
        """Return a field that must be true or false.

        Raises:
            UserError: the field has another value.
        """
        value = self[name]
        if not isinstance(value, bool):
            raise UserError(self.where(name), f"{show(value)} is not true or false", "give one of them")
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Require a field to have one of the values that our models support.

        Raises:
            UserError: the field has another value.
        """
        value = self[name]
        # Python treats 0 as equal to False and 1 as equal to True. JSON does not.
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
            choices = " or ".join(show(one) for one in allowed)
            raise UserError(self.where(name), f"{show(value)} is not supported", f"only {choices} is supported")

    def per(self, name: str, whole: float, by: str, of: int) -> int:
        """Return `whole` / `of`, which must be an integer above 0.

        Args:
            name: name of the field that `whole` is derived from.
            whole: dividend.
            by: description of the divisor for the error message.
            of: divisor.

        Raises:
            UserError: the quotient is not an integer above 0.
        """
        times = round(whole / of)
        made = "" if self[name] == whole else f" makes {whole:g}, which"
        if times < 1 or not math.isclose(times * of, whole, rel_tol=1e-9):
            raise UserError(
                self.where(name),
                f"{show(self[name])}{made} is not divisible by {by} {of}",
                "only a multiple is supported",
            )
        return times
