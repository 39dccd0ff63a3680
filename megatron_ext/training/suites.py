"""Suites of tests by name: what each is told, and what does it. Importing this is quick; a suite takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from megatron_ext.errors import UserError


@dataclass(frozen=True)
class Suite:
    """Tests of a model. Both parts are named as `pkgutil.resolve_name` takes them, and imported when asked for.

    Attributes:
        options: dataclass of what it is told.
        function: see `training.evaluation.Test`.
        in_training: whether it can run between steps; loss by domain has its own rhythm, `training.evaluate_every`.
    """

    options: str
    function: str
    in_training: bool = True

    def options_of(self, name: str, fields: dict[str, Any]) -> Any:
        """Its typed options.

        Args:
            name: the suite's, for messages.
            fields: of its options, as plain values.

        Raises:
            UserError: a field is not there, or a value is out of its range.
        """
        from megatron_ext.config.validate import validate

        return validate(self.options_type(), fields, prefix=f"{name}.")

    def options_type(self) -> type[Any]:
        """The dataclass."""
        found: type[Any] = resolve_name(self.options)
        return found

    def test(self) -> Callable[..., Any]:
        """The function."""
        found: Callable[..., Any] = resolve_name(self.function)
        return found


SUITES: dict[str, Suite] = {
    "domains": Suite(
        "megatron_ext.evaluation.domain_results:DomainOptions", "megatron_ext.training.evaluation:domains", False
    ),
    "retrieval": Suite(
        "megatron_ext.evaluation.retrieval.options:RetrievalOptions", "megatron_ext.training.evaluation:retrieval"
    ),
    "fewshot": Suite(
        "megatron_ext.evaluation.fewshot.options:FewshotOptions", "megatron_ext.training.evaluation:fewshot"
    ),
}


def read_overrides(name: str, overrides: Sequence[str]) -> Any:
    """The options of a suite from `field=value`, see `Suite.options_of`."""
    from megatron_ext.config.load import read_fields

    suite = SUITES[name]
    return suite.options_of(name, read_fields(overrides, suite.options_type(), f"{name}."))


def check_names(where: str, names: Sequence[str], known: Mapping[str, Suite] = SUITES) -> None:
    """Refuse a name that is no suite's.

    Args:
        where: they were given.
        names: of suites.
        known: to choose from.

    Raises:
        UserError: one is unknown.
    """
    for name in names:
        if name not in known:
            raise UserError(where, f"no suite {name!r}", f"choose from: {', '.join(known)}")
