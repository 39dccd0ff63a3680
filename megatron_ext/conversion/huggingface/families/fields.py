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
        values: fields that the configuration contains.
        defaults: defaults of the architecture for missing fields.
        prefix: text before a field's name in error messages.
        hint: hint in the error message for a missing field.
    """

    values: Mapping[str, Any]
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
        if name in self.values:
            return self.values[name]
        if name in self.defaults:
            return self.defaults[name]
        raise UserError(self.where(name), "missing", self.hint)

    def positive_int(self, name: str) -> int:
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
        value = self.positive_int(name)
        if value > MAX_LAYERS:
            raise UserError(
                self.where(name), f"{show(value)} is more than {MAX_LAYERS} layers", "give at most that many"
            )
        return value

    def positive_int_or(self, name: str, fallback: int) -> int:
        """Return a field that must be an integer above 0, or `fallback` if the field is null."""
        return fallback if self[name] is None else self.positive_int(name)

    def heads(self, heads: str, groups: str, width: str) -> dict[str, int]:
        """Return the fields of `ModelConfig` for grouped-query attention.

        Args:
            heads: name of the field with the number of query heads.
            groups: name of the field with the number of key heads. Null: each query head has its own key head.
            width: name of the field with the head dimension. Null: hidden size / number of query heads.

        Raises:
            UserError: the query heads are not divisible by the key heads, or the hidden size by the query heads.
        """
        num_heads, hidden_size = self.positive_int(heads), self.positive_int("hidden_size")
        num_groups = self.positive_int_or(groups, num_heads)
        self.divide(heads, num_heads, groups, num_groups)
        head_dim = (
            self.divide("hidden_size", hidden_size, heads, num_heads)
            if self[width] is None
            else self.positive_int(width)
        )
        return {"num_attention_heads": num_heads, "num_query_groups": num_groups, "head_dim": head_dim}

    def positive_number(self, name: str) -> float:
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
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            choices = " or ".join(show(choice) for choice in allowed)
            raise UserError(self.where(name), f"{show(value)} is not supported", f"only {choices} is supported")

    def divide(self, name: str, dividend: float, divisor_name: str, divisor: int) -> int:
        """Return `dividend` / `divisor`, which must be an integer above 0.

        Args:
            name: name of the field that determines the dividend.
            dividend: dividend. It differs from the field if it is derived from several fields.
            divisor_name: description of the divisor for the error message.
            divisor: divisor.

        Raises:
            UserError: the quotient is not an integer above 0.
        """
        quotient = round(dividend / divisor)
        derived = "" if self[name] == dividend else f" makes {dividend:g}, which"
        if quotient < 1 or not math.isclose(quotient * divisor, dividend, rel_tol=1e-9):
            raise UserError(
                self.where(name),
                f"{show(self[name])}{derived} is not divisible by {divisor_name} {divisor}",
                "only a multiple is supported",
            )
        return quotient
