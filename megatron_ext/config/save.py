"""Writing a configuration so that reading it back gives an equal one."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

from megatron_ext.config.schema import RunConfig
from megatron_ext.utils.atomic_files import os_error_reason, write_atomically
from megatron_ext.utils.credentials import redact, redact_tree
from megatron_ext.utils.errors import UserError


class _Representer(SafeRepresenter):
    """YAML representer: lists in flow style (`[0.9, 0.95]`), the rest in block style, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(representer: SafeRepresenter, data: list[Any]) -> Any:
    return representer.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)


def _represent_text(representer: SafeRepresenter, data: str) -> Any:
    # The other styles fold line separators such as U+0085 into spaces. Double quotes escape them.
    style = None if data.isprintable() else '"'
    return representer.represent_scalar("tag:yaml.org,2002:str", data, style=style)


def _represent_float(representer: SafeRepresenter, data: float) -> Any:
    # 1e-05 is a number in YAML 1.2 only, 1.0e-05 also in YAML 1.1, which other tools may use.
    text = repr(data)
    text = text if "." in text else text.replace("e", ".0e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


_Representer.add_representer(float, _represent_float)
_Representer.add_representer(list, _represent_list)
_Representer.add_representer(str, _represent_text)


def to_yaml(config: RunConfig) -> str:
    """Return a configuration as YAML, with keys in the order of the schema.

    Args:
        config: the configuration.

    Returns:
        The text. `load_config` of it equals `config` if that is complete (see `load.resolve`) and contains no
            credentials. Credentials in URLs are left out.
    """
    return tree_to_yaml(TypeAdapter(RunConfig).dump_python(config, mode="json"))


def tree_to_yaml(tree: dict[str, Any]) -> str:
    """Return plain sections as YAML, with keys in their given order and without credentials in URLs.

    `load.read_tree` of the text equals `tree` if that contains no credentials.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.allow_unicode = True
    yaml.width = 100_000  # a long pattern stays on one line
    stream = io.StringIO()
    yaml.dump(redact_tree(tree), stream)
    return stream.getvalue()


def private_yaml(config: RunConfig) -> str | None:
    """Return a YAML overlay with the credentials that `to_yaml` leaves out of `data.path`. None: there are none."""
    path = config.data.path
    if redact(path) == path:
        return None
    return "data: {path: " + json.dumps(path) + "}\n"  # JSON is valid YAML, and this path is not redacted


def save_config(config: RunConfig, path: Path) -> None:
    """Write a configuration to a file atomically.

    Args:
        config: the configuration.
        path: the file. Its folder exists. An existing file is only replaced once the new one is complete.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        write_atomically(Path(path), to_yaml(config).encode())
    except OSError as error:
        raise UserError(
            str(path), f"cannot be written ({os_error_reason(error)})", "check the folder's permissions and free space"
        ) from None
