"""Removal of credentials from URLs before they are shown or saved."""

from __future__ import annotations

import re
from typing import Any

REDACTED = "***"
"""Replacement of removed credentials."""

_PUBLIC_USER_SCHEMES = {
    *("abfs", "abfss", "adl", "az", "ftp", "hdfs", "hf"),
    *("scp", "sftp", "smb", "ssh", "wasb", "wasbs", "webhdfs"),
}
"""Schemes whose part before `@` is a container or user name and not secret; in other schemes it may be a token."""

# A password may contain unescaped slashes, as S3 keys do. A port before a path with @ is not a password.
_PASSWORD = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^\s/@:?#]*):(?!\d{1,5}/)(?:(?!://)[^\s@?#])*@")
_USER = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<user>[^\s/@:?#]+)@")
_PARAMETER = re.compile(
    r"(?P<name>[?&#;][^\s=&#;?]*(?:sig|token|key|secret|pass|pwd|cred|auth|session|policy|code|jwt|bearer)[^\s=&#;?]*=)"
    r"[^\s&#;'\"]+",
    re.IGNORECASE,
)


def redact(text: str) -> str:
    """Remove passwords, tokens and signatures from the URLs in a text.

    Args:
        text: a URL, or text that contains URLs; other text is returned unchanged.
    """
    if "://" not in text:
        return text
    text = _PASSWORD.sub(rf"\g<scheme>://{REDACTED}@", text)
    text = _USER.sub(_redact_user, text)
    return _PARAMETER.sub(rf"\g<name>{REDACTED}", text)


def _redact_user(match: re.Match[str]) -> str:
    if match["scheme"].lower() in _PUBLIC_USER_SCHEMES or match["user"] == REDACTED:
        return match[0]
    return f"{match['scheme']}://{REDACTED}@"


def remove_secrets(url: str, text: str) -> str:
    """Remove the credentials of a URL from a text, such as a library's message about it."""
    for match in (*_PASSWORD.finditer(url), *_USER.finditer(url)):
        if match["scheme"].lower() not in _PUBLIC_USER_SCHEMES or ":" in match[0].partition("://")[2]:
            text = text.replace(match[0].partition("://")[2].removesuffix("@"), REDACTED)
    for match in _PARAMETER.finditer(url):
        text = text.replace(match[0].removeprefix(match["name"]), REDACTED)
    return redact(text)


def redact_tree(value: Any) -> Any:
    """Redact all strings in nested lists and dictionaries."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {key: redact_tree(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_tree(item) for item in value]
    return value


def is_redacted(url: str) -> bool:
    """Return whether a URL was saved without its credentials."""
    return "://" in url and REDACTED in url
