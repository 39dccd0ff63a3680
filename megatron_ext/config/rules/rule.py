"""Definition of a rule and of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config.layout import Layout
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.traits import Mixers


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Input of the rules, computed once.

    Attributes:
        config: a complete configuration (see `derive`).
        layout: its layout for the world size.
        layers: mixer name of each layer.
        mixers: the registered mixers.
    """

    config: RunConfig
    layout: Layout
    layers: list[str]
    mixers: Mixers


Violation = tuple[str, str] | None
"""Result of a rule: None if it holds, else (problem, hint)."""

Test = Callable[[Facts], Violation]
"""Function of a rule."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule with its name, the field that its violation is reported on, and its test."""

    name: str
    field: str
    test: Test


class Rules(list[Rule]):
    """List of rules in the order in which they run."""

    def on(self, field: str) -> Callable[[Test], Test]:
        """Return a decorator that adds a function as a rule reported on `field`."""

        def add(test: Test) -> Test:
            self.append(Rule(name=test.__name__, field=field, test=test))
            return test

        return add


def does_not_divide(name: str, value: int, by: str, divisor: int, hint: str) -> Violation:
    """Return the error for a value that must be a multiple of `divisor`, or None."""
    if value % divisor == 0:
        return None
    return f"{name} {value} is not divisible by {by} {divisor}", hint
