"""Effect of changing each configuration field on a run that has begun.

All comparisons of configurations use this one list: `--resume`, `run.branch_from`, reports and fits (which runs are
seeds of one recipe) and sweeps. It contains every field of the schema. A test fails if one is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.schema import SUITE_SECTIONS, RunConfig
from megatron_ext.config.validate import sections
from megatron_ext.utils.credentials import redact_tree


class Effect(Enum):
    """Consequence of changing a field's value."""

    NOTHING = "nothing"
    """Names, paths, speed, layout: losses stay the same up to rounding."""
    MEASURED = "what is measured"
    """Evaluation and its frequency. Training stays the same."""
    FUTURE = "the steps to come"
    """Handling of future steps. Past steps would have been the same."""
    SCHEDULE = "the learning rate"
    """Learning rates. As `PAST` if the rates of past steps differ, else only future steps are affected."""
    PAST = "the steps before"
    """Past steps would have differed. A resumed run would match no single configuration."""
    MODEL = "the model"
    """Another model or optimizer, whose tensors do not match the checkpoint."""


_BY_EFFECT: dict[Effect, dict[str, str]] = {
    Effect.NOTHING: {
        "data": "path cache_dir cache_gib tokenizer verify document_boundaries",  # a digest identifies the data itself
        "parallel": "tensor sequence pipeline virtual_pipeline context context_exchange context_exchange_rounds "
        "context_transport batch_p2p_comm",
        "training": "micro_batch_size recompute checkpoint_every keep_checkpoints keep_every async_checkpoints",
        "optimizer": "sharding offload offload_parameters deepspeed",
        "resilience": "retries limit heartbeat_seconds straggler_every straggler_factor",
        "logging": "backends",
        "run": "dir name backend device hang_timeout branch_from allow_changed allow_other_data",
    },
    Effect.MEASURED: {
        "data": "test_domains",
        "training": "evaluate_every evaluate_classes evaluate_suites evaluate_suites_every evaluation_sequences",
    },
    Effect.FUTURE: {
        "data": "on_damaged",
        "resilience": "on_nonfinite on_spike spike_deviations spike_window",
    },
    Effect.SCHEDULE: {
        "training": "steps",
        "optimizer": "lr min_lr schedule warmup_steps decay_steps",
    },
    Effect.PAST: {
        "data": "train_domains weights seq_length reset_attention reset_positions",
        "model": "rotary_base norm_epsilon init_std",
        "training": "global_batch_size precision fp8 seed",
        "optimizer": "weight_decay betas epsilon clip_grad",
    },
    Effect.MODEL: {
        "model": "pattern block normalization hidden_size num_attention_heads num_query_groups head_dim "
        "ffn_hidden_size max_position_embeddings tie_embeddings vocab_size_multiple",
        "optimizer": "name",
    },
}

EFFECTS: dict[str, Effect] = {
    f"{section}.{name}": effect
    for effect, by_section in _BY_EFFECT.items()
    for section, names in by_section.items()
    for name in names.split()
}
"""Effect by dotted field. For fields of mixers and suites, which the schema does not define, see `effect_of`."""

DERIVED: dict[str, tuple[str, ...]] = {
    "model.num_query_groups": ("model.num_attention_heads",),
    "model.head_dim": ("model.hidden_size", "model.num_attention_heads"),
    "model.ffn_hidden_size": ("model.hidden_size", "model.block"),
    "model.max_position_embeddings": ("data.seq_length",),
}
"""Source fields of each field that `derive` fills in."""

SEED = "training.seed"


@dataclass(frozen=True)
class Change:
    """Field whose value differs between two configurations.

    Attributes:
        field: dotted name.
        before: value in the first.
        after: value in the second.
    """

    field: str
    before: Any
    after: Any

    @property
    def effect(self) -> Effect:
        """Effect of the change."""
        return effect_of(self.field)


def effect_of(field: str) -> Effect:
    """Return the effect of changing a field.

    Args:
        field: dotted name, e.g. `training.steps`, `mixers.attention.window`, `retrieval.lengths`.

    Raises:
        KeyError: no such field exists.
    """
    section = field.partition(".")[0]
    if section == "mixers":
        return Effect.PAST
    return Effect.MEASURED if section in SUITE_SECTIONS else EFFECTS[field]


def is_field(name: str) -> bool:
    """Return whether the schema has this dotted field. For mixers and suites only the section is checked."""
    return name in EFFECTS or name.partition(".")[0] in ("mixers", *SUITE_SECTIONS)


def distinguishes_recipes(field: str) -> bool:
    """Return whether runs that differ in this field are different recipes, rather than seeds of one."""
    return field != SEED and effect_of(field) not in (Effect.NOTHING, Effect.MEASURED)


def flat(config: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Return every field of a configuration by its dotted name, as plain values.

    Args:
        config: a configuration, or its plain tree from YAML. A tree of an older schema gets today's defaults for
            missing fields, and unknown fields are dropped. Only mixers in the pattern are included.

    Returns:
        Values by dotted field. Credentials in URLs are redacted, because the result is displayed and stored in
            checkpoints.
    """
    tree = TypeAdapter(RunConfig).dump_python(config, mode="json") if isinstance(config, RunConfig) else config
    tree = redact_tree(tree)
    fields = dict(_schema_fields(tree))
    fields["model.pattern"] = "".join(fields["model.pattern"].split())
    for mixer in dict.fromkeys(parse_pattern(fields["model.pattern"])):
        given = (tree.get("mixers") or {}).get(mixer) or {}
        fields |= {f"mixers.{mixer}.{name}": value for name, value in given.items()}
    for suite in SUITE_SECTIONS:
        fields |= {f"{suite}.{name}": value for name, value in (tree.get(suite) or {}).items()}
    return fields


def with_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add today's defaults for fields that were missing from the schema when `flat` was called.

    As in `flat`, fields that today's schema does not contain are dropped.
    """
    return {**dict(_schema_fields({})), **{name: value for name, value in fields.items() if is_field(name)}}


def _schema_fields(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, kind in sections(RunConfig).items():
        given = tree.get(section) or {}
        for field in dataclasses.fields(kind):
            yield f"{section}.{field.name}", given[field.name] if field.name in given else _default(field)


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return a field's default, or None if the field is required."""
    default = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True)
    elif default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    return default


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[Change]:
    """List the fields that differ, in the order of the schema.

    A derived field is left out if one of its source fields differs.

    Args:
        before: first configuration, from `flat`.
        after: second configuration, from `flat`.
        defaults: defaults of mixer fields by dotted name, for configurations written before these fields existed.
    """
    known = defaults or {}
    found = [
        Change(field, before.get(field, known.get(field)), after.get(field, known.get(field)))
        for field in dict.fromkeys([*after, *before])
    ]
    differing = [change for change in found if not _equal(change.before, change.after)]
    names = {change.field for change in differing}
    return [change for change in differing if not names.intersection(DERIVED.get(change.field, ()))]


def _equal(left: Any, right: Any) -> bool:
    """Compare as JSON does: a tuple equals a list, and a bool does not equal a number."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)
