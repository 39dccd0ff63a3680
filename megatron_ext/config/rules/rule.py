"""What a rule is, and what it looks at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.config.layout import Layout
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.traits import Mixers


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the rules look at, each computed once.

    Attributes:
        config: a whole configuration (see `derive`).
        layout: its layout on the world at hand.
        layers: a mixer's name for every layer.
        mixers: the registered mixers.
    """

    config: RunConfig
    layout: Layout
    layers: list[str]
    mixers: Mixers


Broken = tuple[str, str] | None
"""None: the rule holds; else (problem, mend)."""

Test = Callable[[Facts], Broken]
"""A rule's function."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: its name, the field that it is reported on, and its test."""

    name: str
    field: str
    test: Test


class Rules(list[Rule]):
    """Rules in the order in which they run."""

    def on(self, field: str) -> Callable[[Test], Test]:
        """Add the decorated function, reported on `field`."""

        def add(test: Test) -> Test:
            self.append(Rule(name=test.__name__, field=field, test=test))
            return test

        return add


def does_not_divide(name: str, value: int, by: str, divisor: int, mend: str) -> Broken:
    """Return the error of a value that must be a multiple of another."""
    if value % divisor == 0:
        return None
    return f"{name} {value} does not divide by {by} {divisor}", mend
