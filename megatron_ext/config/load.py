"""Reading a configuration: YAML files and dotted overrides give a validated, complete `RunConfig`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from megatron_ext.config.derive import derive
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import SUITE_SECTIONS, RunConfig
from megatron_ext.config.suggest import suggest, unknown_mixer
from megatron_ext.config.traits import Mixers
from megatron_ext.config.validate import field_names, sections, show, validate
from megatron_ext.config.yaml_text import TooLargeError, parse_yaml, read_yaml
from megatron_ext.run_folder.layout import CONFIG
from megatron_ext.utils.errors import UserError

Tree = dict[str, Any]


def load_config(path: Path, overrides: Sequence[str], mixer_configs: Mixers) -> RunConfig:
    """Read, override, validate and complete a configuration.

    Args:
        path: the YAML file.
        overrides: overrides, applied in order. Each is `section.field=value` with the value in YAML (`[a, b]`, `1e-3`,
            `true`, `null`), or the path of another YAML file whose fields replace the existing ones.
        mixer_configs: the registered mixers, by name.

    Returns:
        The configuration with the mixers' defaults and the derived fields filled in. Constraints between fields are not
            checked here, because they depend on the number of processes (see `rules.check`).

    Raises:
        UserError: a file, key or value is invalid. The message is one line.
    """
    tree = read_tree(path)
    for override in overrides:
        if "=" not in override and override.endswith((".yaml", ".yml")):
            merge_into(tree, read_tree(Path(override)))
        else:
            apply_override(tree, override, mixer_configs)
    # Treat a section that is absent, or whose fields are all commented out, as empty. An error then names the missing
    # field (data.path) instead of the section.
    for name in (*sections(RunConfig), *SUITE_SECTIONS):
        tree[name] = {} if tree.get(name) is None else tree[name]
    return resolve(validate(RunConfig, _without_empty_mixers(tree)), mixer_configs)


def resolve(config: RunConfig, mixer_configs: Mixers) -> RunConfig:
    """Complete a configuration: validate the mixers, fill in their defaults and the derived fields.

    Args:
        config: a configuration, e.g. one built in Python.
        mixer_configs: the registered mixers, by name.

    Returns:
        The complete configuration. A complete input is returned unchanged.

    Raises:
        UserError: a mixer is unknown, a field of a mixer's configuration is invalid, or the layer pattern cannot be
            parsed.
    """
    for name in config.mixers:
        if name not in mixer_configs:
            raise unknown_mixer(f"mixers.{name}", name, mixer_configs)
    for name in parse_pattern(config.model.pattern):
        if name not in mixer_configs:
            raise unknown_mixer("model.pattern", name, mixer_configs)
    names = dict.fromkeys([*config.mixers, *parse_pattern(config.model.pattern)])
    mixers = {name: _complete_mixer(name, config.mixers.get(name, {}), mixer_configs) for name in names}
    return derive(replace(config, mixers=mixers))


def read_tree(path: Path, what: str = "configuration", first: str = "a section like `data:`") -> Tree:
    """Read a YAML file that contains one mapping.

    Args:
        path: the file.
        what: kind of file, for messages.
        first: example of a first line, for messages.

    Returns:
        The content as plain Python values.

    Raises:
        UserError: the file is missing, is not YAML, contains a key twice or is not a mapping. The message names file
            and line.
    """
    try:
        text = read_yaml(Path(path))
    except FileNotFoundError:
        raise UserError(str(path), "no such file", f"give the path of a {what}, see examples/") from None
    except IsADirectoryError:
        if (Path(path) / CONFIG).exists():
            raise UserError(str(path), "is the folder of a run", f"give its {path}/config.yaml") from None
        raise UserError(str(path), "is a folder", f"give the path of a {what}, see examples/") from None
    except (OSError, UnicodeDecodeError, TooLargeError) as error:
        raise UserError(str(path), f"cannot be read ({_one_line(error)})", "give a YAML text file") from None
    tree = _parse(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(str(path), "is not a mapping of sections", f"start with {first}, see examples/")
    return tree


def merge_into(tree: Tree, overlay: Tree) -> None:
    """Replace fields of `tree` by those of `overlay`, in place. Sections are merged recursively."""
    for key, value in overlay.items():
        existing = tree.get(key)
        if isinstance(existing, dict) and isinstance(value, dict):
            merge_into(existing, value)
        elif value is not None or not isinstance(existing, dict):  # a section without fields changes nothing
            tree[key] = value


def apply_override(tree: Tree, override: str, mixer_configs: Mixers) -> None:
    """Set one field of a tree in place.

    Args:
        tree: the plain configuration.
        override: `section.field=value`.
        mixer_configs: the registered mixers, whose fields can be set too.

    Raises:
        UserError: the text has no `=`, the key does not exist or names a section, or the value is not YAML.
    """
    key, equals, text = override.partition("=")
    if not equals:
        hint = "write it like training.steps=200, or give a .yaml file"
        raise UserError(override, "is not an override", hint)
    known = known_keys(mixer_configs)
    if key not in known and not _is_suite_field(key):
        section_keys = [name for name in known if name.startswith(key + ".")]
        if section_keys:
            raise UserError(key, "is a section, not a field", f"set one of its fields, e.g. {section_keys[0]}=...")
        if key in SUITE_SECTIONS:
            raise UserError(key, "is a section, not a field", f"set one of its fields: {key}.FIELD=...")
        section, _, rest = key.partition(".")
        mixer = rest.partition(".")[0]
        if section == "mixers" and mixer not in mixer_configs:
            raise unknown_mixer(key, mixer, mixer_configs)
        raise UserError(key, "no such field", _suggest_key(key, known))
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        node[parent] = node = {} if node.get(parent) is None else node[parent]
        if not isinstance(node, dict):
            raise UserError(parent, f"{show(node)} is not a section of fields", "write its fields below it, indented")
    node[last] = _parse(text, key)


def _is_suite_field(key: str) -> bool:
    section, _, field = key.partition(".")
    return section in SUITE_SECTIONS and field.isidentifier()


def read_fields(overrides: Sequence[str], kind: type, prefix: str) -> Tree:
    """Parse overrides of the fields of one dataclass.

    Args:
        overrides: `field=value`, with the value in YAML.
        kind: the dataclass. None of its fields is a section.
        prefix: dotted name of its section with the trailing dot, for messages.

    Returns:
        The parsed values, by field name.

    Raises:
        UserError: a field does not exist, or a value is not YAML.
    """
    known = [prefix + name for name in field_names(kind)]
    tree = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise UserError(prefix + override, "is not an override", f"write it like {known[0]}=...")
        if prefix + name not in known:
            raise UserError(prefix + name, "no such field", _suggest_key(prefix + name, known))
        tree[name] = _parse(text, prefix + name)
    return tree


def known_keys(mixer_configs: Mixers) -> list[str]:
    """Return the dotted names of all fields, including those of the registered mixers."""
    keys = [f"{section}.{name}" for section, kind in sections(RunConfig).items() for name in field_names(kind)]
    for mixer, entry in mixer_configs.items():
        keys += [f"mixers.{mixer}.{name}" for name in field_names(entry.config_type)]
    return keys


def _suggest_key(key: str, known: Sequence[str]) -> str:
    section = key.rpartition(".")[0]
    section_keys = [name for name in known if name.rpartition(".")[0] == section]
    names_by_ending = {name.rpartition(".")[2]: name for name in section_keys}
    # A typo in the last part is likelier than one in the section, which exists.
    matches = difflib.get_close_matches(key.rpartition(".")[2], names_by_ending, n=1, cutoff=0.6)
    if matches:
        return f"did you mean {names_by_ending[matches[0]]}?"
    suggestion = suggest(key, known)
    return suggestion if suggestion.startswith("did") or not section_keys else suggest(key, section_keys)


def _parse(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"{where}:{mark.line + 1}" if mark is not None and "\n" in text.strip() else where
        raise UserError(location, f"is not valid YAML ({_problem(error)})", "fix the line") from None
    except TooLargeError as error:
        raise UserError(
            where, f"is too large for a configuration ({error})", "remove what a run or a sweep does not need"
        ) from None
    except (YAMLError, ValueError, RecursionError) as error:
        raise UserError(where, f"is not valid YAML ({_one_line(error)})", "give plain YAML text") from None


def _problem(error: MarkedYAMLError) -> str:
    return _one_line(error.problem or error.context or "unreadable")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]


def _without_empty_mixers(tree: Tree) -> Tree:
    mixers = tree.get("mixers")
    if mixers is None:
        return {**tree, "mixers": {}}
    if not isinstance(mixers, Mapping):
        return tree
    return {**tree, "mixers": {name: {} if fields is None else fields for name, fields in mixers.items()}}


def _complete_mixer(name: str, fields: Tree, mixer_configs: Mixers) -> Tree:
    kind = mixer_configs[name].config_type
    complete: Tree = TypeAdapter(kind).dump_python(validate(kind, fields, prefix=f"mixers.{name}."), mode="json")
    return complete
