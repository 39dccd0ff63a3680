"""Validation of plain trees by pydantic, with one-line errors: the field, its value and a solution."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from datetime import date
from pathlib import PurePath
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megatron_ext.config.pattern import on_one_line
from megatron_ext.config.suggest import suggest
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import check_text

T = TypeVar("T")

# pydantic's error type -> (problem, hint). {value} is the invalid value, the other names are pydantic's context.
_MESSAGES = {
    "int_type": ("{value} is not a whole number", "give a whole number, without decimal point or exponent"),
    "int_from_float": ("{value} is not a whole number", "give a whole number, without decimal point or exponent"),
    "float_type": ("{value} is not a number", "give a number, without quotes"),
    "bool_type": ("{value} is not true or false", "write true or false, without quotes"),
    "string_type": ("{value} is not text", "give text; put it in quotes if it looks like a number, true or null"),
    "list_type": ("{value} is not a list", "write it like [a, b]"),
    "dict_type": ("{value} is not a section of fields", "write its fields below it, indented"),
    "dataclass_type": ("{value} is not a section of fields", "write its fields below it, indented"),
    "dataclass_exact_type": ("{value} is not a section of fields", "write its fields below it, indented"),
    "greater_than": ("{value} is out of range", "give a value greater than {gt:g}"),
    "greater_than_equal": ("{value} is out of range", "give a value of at least {ge:g}"),
    "less_than": ("{value} is out of range", "give a value less than {lt:g}"),
    "less_than_equal": ("{value} is out of range", "give a value of at most {le:g}"),
    "finite_number": ("{value} is not a finite number", "give a finite number"),
    "too_short": ("{value} has too few entries", "give {min_length} or more"),
    "too_long": ("{value} has too many entries", "give {max_length} at most"),
    "switch": ("{value} is not true, false or auto", "write one without quotes"),
    "power_of_two": ("{value} is not a power of two", "give 32, 64, 128, 256 or 512"),
    "unknown_name": ("{value} is not one of the choices", "{hint}"),
    "string_pattern_mismatch": ("{value} has characters that are not allowed here", "it must match {pattern}"),
}


def validate(kind: type[T], tree: dict[str, Any], prefix: str = "") -> T:
    """Build a dataclass from a plain tree without converting values.

    Args:
        kind: a pydantic dataclass made with `schema.STRICT`.
        tree: values parsed from YAML.
        prefix: dotted name of `tree` in the configuration with the trailing dot, for messages.

    Returns:
        The instance.

    Raises:
        UserError: a field is invalid. Describes the first one and names the others.
    """
    # Strict Python mode refuses a dict for a nested dataclass. Strict JSON mode accepts it.
    text = _as_json(tree, prefix)  # also detects recursive anchors
    _check_text(tree, prefix)
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        # Misspelt names first: a missing field is often one of them.
        details = sorted(
            error.errors(include_url=False), key=lambda detail: detail["type"] != "unexpected_keyword_argument"
        )
        raise _first_of([_user_error(kind, detail, prefix) for detail in details]) from None


def field_names(kind: type) -> list[str]:
    """Return the field names of a dataclass, in order."""
    return [field.name for field in dataclasses.fields(kind)]


def sections(kind: type) -> dict[str, type]:
    """Return the fields of a dataclass that are themselves dataclasses, with their types."""
    hints = get_type_hints(kind)
    return {name: hints[name] for name in field_names(kind) if dataclasses.is_dataclass(hints[name])}


def show(value: object) -> str:
    """Return a value on one line of at most 60 characters, in JSON notation.

    Only the part that is shown is serialized, because a value from a file may be large or contain shared parts.
    """
    text = ""
    for piece in _WRITER.iterencode(_cut(value)):
        text += piece
        if len(text) > _SHOWN:
            return text[: _SHOWN - 3] + "..."
    return text


def _cut(value: Any) -> Any:
    return value[: _SHOWN + 1] if isinstance(value, str | bytes | list | tuple) else value


def _show_other(value: Any) -> Any:
    """Return text for a value that JSON cannot represent. Attributes of instances are not shown."""
    plain = isinstance(value, bytes | date | set | complex | PurePath)
    return repr(_cut(value)) if plain else f"<{type(value).__name__}>"


_SHOWN = 60
_WRITER = json.JSONEncoder(ensure_ascii=False, skipkeys=True, default=_show_other)


def _check_text(value: object, where: str) -> None:
    """Refuse control characters in all text of a tree, because it is used in file names, batch scripts and terminals.

    A layer pattern may contain line breaks, as in a YAML block. Its field removes them.
    """
    if isinstance(value, str):
        check_text(where, on_one_line(value) if where == "model.pattern" else value)
    elif isinstance(value, dict):
        for name, field in value.items():
            inner = f"{where.removesuffix('.')}.{name}" if where else str(name)
            _check_text(name, where or "a field's name")
            _check_text(field, inner)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_text(entry, where)


def _as_json(tree: dict[str, Any], prefix: str) -> str:
    for name, value in tree.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            # A YAML tag (!!binary, !!set) or a recursive anchor, which no field accepts.
            problem = f"contains a value that is not text, a number, a list or a section ({error})"
            raise UserError(f"{prefix}{name}", problem, "use plain YAML values") from None
    return json.dumps(tree)


def _first_of(errors: Sequence[UserError]) -> UserError:
    first, *others = errors
    if not others:
        return first
    names = list(dict.fromkeys(other.where for other in others if other.where != first.where))
    more = f" (and {len(others)} more: {', '.join(names[:5]) or first.where}{', ...' if len(names) > 5 else ''})"
    return UserError(first.where, first.problem, first.hint + more)


def _user_error(kind: type, error: ErrorDetails, prefix: str) -> UserError:
    # A union adds the name of its branch to the location. It is not part of the field's name.
    parts = [str(part) for part in error["loc"] if not str(part).startswith(("literal[", "constrained-", "function-"))]
    where = prefix + ".".join(parts)
    context = error.get("ctx", {})
    value = show(error["input"])
    match error["type"]:
        case "missing":
            return UserError(where, "missing", f"write it in the file, or give {where}=... (it has no default)")
        case "unexpected_keyword_argument" | "extra_forbidden":
            return UserError(where, "no such field", suggest(parts[-1], _siblings(kind, parts[:-1])))
        case "literal_error":
            return UserError(where, f"{value} is not one of the choices", f"choose {context['expected']}")
        case kind_of_error if kind_of_error in _MESSAGES:
            problem, hint = _MESSAGES[kind_of_error]
            return UserError(where, problem.format(value=value, **context), hint.format(**context))
    return UserError(where, f"{value} is refused", " ".join(error["msg"].split()))


def _siblings(kind: type, parents: list[str]) -> list[str]:
    """List the fields of the section at the path `parents`."""
    for parent in parents:
        kind = sections(kind).get(parent, kind)
    return field_names(kind)
