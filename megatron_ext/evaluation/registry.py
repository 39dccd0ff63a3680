"""Registry of evaluation suites: their options and functions by name.

Importing this module is fast, as a suite's own modules are imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from megatron_ext.config.schema import RunConfig


@dataclass(frozen=True)
class Suite:
    """Evaluation suite. Its parts are given as `pkgutil.resolve_name` strings and imported on first use.

    Attributes:
        options: dataclass of its options.
        function: evaluation function, an `evaluation.suite.Test`.
        checker: function that checks the options, an `evaluation.suite.Check`.
        in_training: True if it can run between steps. Loss by domain has its own interval, `training.evaluate_every`.
        config_checker: function that checks the options of a suite between steps against the configuration of the run,
            before the run starts; None: there is nothing to check.
    """

    options: str
    function: str
    checker: str
    in_training: bool = True
    config_checker: str | None = None

    def parse_options(self, name: str, fields: dict[str, Any]) -> Any:
        """Return the validated options.

        Args:
            name: name of the suite, for messages.
            fields: options as plain values.

        Raises:
            UserError: a field is unknown or missing, or a value is out of range.
        """
        from megatron_ext.config.validate import validate

        return validate(self.options_type(), fields, prefix=f"{name}.")

    def options_type(self) -> type[Any]:
        """Import and return the options dataclass."""
        resolved: type[Any] = resolve_name(self.options)
        return resolved

    def test(self) -> Callable[..., Any]:
        """Import and return the evaluation function."""
        resolved: Callable[..., Any] = resolve_name(self.function)
        return resolved

    def check(self) -> Callable[..., None]:
        """Import and return the function that checks the options before anything is computed."""
        resolved: Callable[..., None] = resolve_name(self.checker)
        return resolved

    def check_config(self, options: Any, config: RunConfig) -> None:
        """Check the options against the configuration of a run.

        Raises:
            UserError: the suite cannot run with these options between the steps of this run.
        """
        if self.config_checker is not None:
            resolve_name(self.config_checker)(options, config)


_SUITES_MODULE = "megatron_ext.evaluation.suite"

SUITES: dict[str, Suite] = {
    "domains": Suite(
        "megatron_ext.evaluation.domain_results:DomainOptions",
        f"{_SUITES_MODULE}:domains",
        f"{_SUITES_MODULE}:check_domains",
        False,
    ),
    "retrieval": Suite(
        "megatron_ext.evaluation.retrieval.options:RetrievalOptions",
        f"{_SUITES_MODULE}:retrieval",
        f"{_SUITES_MODULE}:check_retrieval_options",
        config_checker="megatron_ext.evaluation.retrieval.options:check_config",
    ),
    "fewshot": Suite(
        "megatron_ext.evaluation.fewshot.options:FewshotOptions",
        f"{_SUITES_MODULE}:fewshot",
        f"{_SUITES_MODULE}:check_fewshot_options",
        config_checker="megatron_ext.evaluation.fewshot.run:check_config",
    ),
}


def read_overrides(name: str, overrides: Sequence[str]) -> Any:
    """Parse the options of a suite from `field=value` strings, see `Suite.parse_options`."""
    from megatron_ext.config.load import read_fields

    suite = SUITES[name]
    return suite.parse_options(name, read_fields(overrides, suite.options_type(), f"{name}."))


def check_names(where: str, names: Sequence[str], known: Mapping[str, Suite] = SUITES) -> None:
    """Reject names of unknown suites.

    Args:
        where: origin of the names, for the message.
        names: names of suites.
        known: available suites.

    Raises:
        UserError: a name is unknown.
    """
    for name in names:
        if name not in known:
            raise UserError(where, f"no suite {name!r}", f"choose from: {', '.join(known)}")


def check_suites(config: RunConfig) -> dict[str, Any]:
    """Check the suites to run between steps, as far as the configuration allows, and return their options by name.

    Raises:
        UserError: a suite is unknown or cannot run here, or an option is missing, out of range or too long.
    """
    names = config.training.evaluate_suites
    suites = {name: suite for name, suite in SUITES.items() if suite.in_training}
    check_names("training.evaluate_suites", names, suites)
    for name in suites:
        fields = getattr(config, name)
        if fields and name not in names:
            problem = "belongs to a suite that is not in training.evaluate_suites"
            raise UserError(f"{name}.{next(iter(fields))}", problem, f"add {name} there, or remove it")
    options = {name: suites[name].parse_options(name, getattr(config, name)) for name in dict.fromkeys(names)}
    for name, parsed in options.items():
        suites[name].check_config(parsed, config)
    return options
