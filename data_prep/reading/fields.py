"""Text and domain of a record, for all file formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from data_prep.documents import MalformedError, check_length, short_domain

MAX_DOMAIN_LENGTH = 200
"""Maximum number of characters of a domain name. It names a folder, and a worker keeps all names in memory."""

MAX_LISTED_KEYS = 8
"""Maximum number of a record's keys in a message."""

TEXT_KEY = "text"
DOMAIN_KEYS = ("meta.redpajama_set_name", "domain")
"""Default keys of a record's domain, in order of preference: SlimPajama's, then a key of its own."""


@dataclass(frozen=True)
class Fields:
    """Location of text and domain in a record.

    Attributes:
        text: key of the text; `a.b` means key `b` in the object `a` if there is no key `a.b`.
        domain: key of the domain in the same format; None: the first of `DOMAIN_KEYS` that exists.
        default: domain of records that name none; None: such records are malformed.
    """

    text: str = TEXT_KEY
    domain: str | None = None
    default: str | None = None

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the keys of the domain; the first one that exists is used."""
        return DOMAIN_KEYS if self.domain is None else (self.domain,)


class Found(NamedTuple):
    """Well-formed record.

    Attributes:
        place: location in the file, appended to the file's name in an id.
        text: the text.
        domain: name of the domain.
        changes: changes that the reader made to the text; see `Document`.
    """

    place: str
    text: str
    domain: str
    changes: tuple[str, ...] = ()


def text_and_domain(record: Any, fields: Fields) -> tuple[str, str]:
    """Return text and short domain name of a record.

    Args:
        record: content of a line, a member or a row.
        fields: location of text and domain.

    Raises:
        MalformedError: the text or the domain is missing, too long, or not valid Unicode.
    """
    text = _look_up(record, fields.text)
    if not isinstance(text, str) or not text.strip():
        raise _no_text(record, fields.text, text)
    check_length(len(text))
    _check_unicode("text", text)
    return text, domain_of(record, fields)


def domain_of(record: Any, fields: Fields) -> str:
    """Return the short domain name of a record.

    Raises:
        MalformedError: the domain is missing, too long, or not valid Unicode.
    """
    found = (_look_up(record, key) for key in fields.domains)
    name = next((value for value in found if value is not None), fields.default)
    if not isinstance(name, str) or not name.strip():
        where = " nor ".join(f"`{key}`" for key in fields.domains)
        problem = f"{'neither ' if ' nor ' in where else 'no '}{where}" if name is None else f"it is {_kind(name)}"
        raise MalformedError("no domain", problem, "give such records a domain with --domain")
    if len(name) > MAX_DOMAIN_LENGTH:
        raise MalformedError("domain too long", f"{len(name):,} characters, at most {MAX_DOMAIN_LENGTH} are supported")
    _check_unicode("domain", name)
    return short_domain(name)


def _look_up(record: Any, key: str) -> Any:
    if not isinstance(record, dict):
        return None
    if key in record or "." not in key:
        return record.get(key)
    first, rest = key.split(".", 1)
    return _look_up(record.get(first), rest)


def _no_text(record: Any, key: str, text: Any) -> MalformedError:
    if not isinstance(record, dict):
        return MalformedError("no text", f"{_kind(record)}, not an object")
    if text is None and key not in record:
        keys = [str(name)[:MAX_DOMAIN_LENGTH] for name in list(record)[:MAX_LISTED_KEYS]]
        more = ", ..." if len(record) > MAX_LISTED_KEYS else ""
        detail = f"no `{key}` among its keys: {', '.join(keys)}{more}" if keys else "an empty object"
        return MalformedError("no text", detail, "give the key of the text with --text-key")
    return MalformedError("no text", f"`{key}` is {_kind(text)}")


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "empty" if not value.strip() else "a string"
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"of type {type(value).__name__}")


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise MalformedError(f"{field} is not valid Unicode", "a lone surrogate") from None
