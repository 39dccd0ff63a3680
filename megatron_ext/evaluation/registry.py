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
        function: see `evaluation.suite.Test`.
        checker: see `evaluation.suite.Check`.
        in_training: it can run between steps. Loss by domain has its own interval, `training.evaluate_every`.
    """

    options: str
    function: str
    checker: str
    in_training: bool = True

    def options_of(self, name: str, fields: dict[str, Any]) -> Any:
        """Return the validated options.

        Args:
            name: of the suite, for messages.
            fields: options as plain values.

        Raises:
            UserError: a field is unknown or missing, or a value is out of range.
        """
        from megatron_ext.config.validate import validate

        return validate(self.options_type(), fields, prefix=f"{name}.")

    def options_type(self) -> type[Any]:
        """Import and return the options dataclass."""
        found: type[Any] = resolve_name(self.options)
        return found

    def test(self) -> Callable[..., Any]:
        """Import and return the evaluation function."""
        found: Callable[..., Any] = resolve_name(self.function)
        return found

    def check(self) -> Callable[..., None]:
        """Import and return the function that checks the options before anything is computed."""
        found: Callable[..., None] = resolve_name(self.checker)
        return found


_TESTING = "megatron_ext.evaluation.suite"

SUITES: dict[str, Suite] = {
    "domains": Suite(
        "megatron_ext.evaluation.domain_results:DomainOptions",
        f"{_TESTING}:domains",
        f"{_TESTING}:check_domains",
        False,
    ),
    "retrieval": Suite(
        "megatron_ext.evaluation.retrieval.options:RetrievalOptions",
        f"{_TESTING}:retrieval",
        f"{_TESTING}:check_retrieval_options",
    ),
    "fewshot": Suite(
        "megatron_ext.evaluation.fewshot.options:FewshotOptions",
        f"{_TESTING}:fewshot",
        f"{_TESTING}:check_fewshot_options",
    ),
}


def read_overrides(name: str, overrides: Sequence[str]) -> Any:
    """Parse the options of a suite from `field=value` strings, see `Suite.options_of`."""
    from megatron_ext.config.load import read_fields

    suite = SUITES[name]
    return suite.options_of(name, read_fields(overrides, suite.options_type(), f"{name}."))


def check_names(where: str, names: Sequence[str], known: Mapping[str, Suite] = SUITES) -> None:
    """Reject names of unknown suites.

    Args:
        where: origin of the names, for the message.
        names: of suites.
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
    names, kinds = config.training.evaluate_suites, {name: one for name, one in SUITES.items() if one.in_training}
    check_names("training.evaluate_suites", names, kinds)
    for name in kinds:
        fields = getattr(config, name)
        if fields and name not in names:
            problem = "belongs to a suite that is not in training.evaluate_suites"
            raise UserError(f"{name}.{next(iter(fields))}", problem, f"add {name} there, or remove it")
    options = {name: kinds[name].options_of(name, getattr(config, name)) for name in dict.fromkeys(names)}
    if "retrieval" in options:
        _check_lengths(options["retrieval"], config.model.max_position_embeddings)
    if "fewshot" in options:
        _check_fewshot(options["fewshot"])
    return options


def _check_lengths(options: Any, longest: int | None) -> None:
    assert longest is not None, "derived"
    too_long = [length for length in options.lengths if length > longest]
    if too_long and options.unfit == "refuse":
        problem = f"{too_long[0]}, but the model supports at most {longest} tokens"
        hint = "reduce them, increase model.max_position_embeddings, or set retrieval.unfit=skip"
        raise UserError("retrieval.lengths", problem, hint)


def _check_fewshot(options: Any) -> None:
    from megatron_ext.evaluation.fewshot.run import check_installed

    check_installed()
    if options.data is not None and not options.data.is_dir():
        raise UserError(
            "fewshot.data",
            f"{options.data} is not a directory",
            "choose a directory that contains the files of the test sets",
        )
