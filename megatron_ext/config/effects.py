"""Fields of a configuration by what a change of them does to a run that has begun.

One list for every place that compares configurations: `--resume`, `run.branch_from`, reports and fits (which runs are
seeds of one recipe), sweeps. Every field of the schema stands in it; a test fails for a new one until it does.
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
from megatron_ext.config.schema import OF_SUITES, RunConfig
from megatron_ext.config.validate import sections
from megatron_ext.credentials import redacted_tree


class Effect(Enum):
    """What a changed value of a field makes different."""

    NOTHING = "nothing"
    """Names, places, speed, layout: losses are the same, to rounding."""
    MEASURED = "what is measured"
    """What is evaluated and how often; the training is the same."""
    FUTURE = "the steps to come"
    """What happens to steps that are not done yet; the steps before are as they would have been."""
    SCHEDULE = "the learning rate"
    """The rates of the schedule: the past if those of the steps before differ, else the steps to come alone."""
    PAST = "the steps before"
    """The steps that are done would have been others: a run that goes on is one that no configuration makes."""
    MODEL = "the model"
    """The checkpoint holds another model, whose tensors do not fit."""


_BY_EFFECT: dict[Effect, dict[str, str]] = {
    Effect.NOTHING: {
        "data": "path cache_dir cache_gib tokenizer verify document_boundaries",  # the data itself has a digest
        "parallel": "tensor sequence pipeline virtual_pipeline context context_exchange context_exchange_rounds "
        "context_transport batch_p2p_comm",
        "training": "micro_batch_size recompute checkpoint_every keep_checkpoints keep_every async_checkpoints",
        "optimizer": "sharding offload offload_parameters deepspeed",
        "resilience": "retries limit heartbeat_seconds straggler_every straggler_factor",
        "run": "dir name backend device hang_timeout branch_from allow_changed allow_other_data",
    },
    Effect.MEASURED: {
        "data": "test_domains",
        "training": "evaluate_every evaluate_suites evaluate_suites_every evaluation_sequences",
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
    },
}

EFFECTS: dict[str, Effect] = {
    f"{section}.{name}": effect
    for effect, by_section in _BY_EFFECT.items()
    for section, names in by_section.items()
    for name in names.split()
}
"""Effect by dotted field; those of mixers and suites, which are not the schema's own, see `effect_of`."""

DERIVED: dict[str, tuple[str, ...]] = {
    "model.num_query_groups": ("model.num_attention_heads",),
    "model.head_dim": ("model.hidden_size", "model.num_attention_heads"),
    "model.ffn_hidden_size": ("model.hidden_size", "model.block"),
    "model.max_position_embeddings": ("data.seq_length",),
}
"""Fields that `derive` fills, by those that they follow from."""

SEED = "training.seed"


@dataclass(frozen=True)
class Change:
    """A field whose value differs between two configurations.

    Attributes:
        field: dotted name.
        before: value of the first.
        after: value of the second.
    """

    field: str
    before: Any
    after: Any

    @property
    def effect(self) -> Effect:
        """What it makes different."""
        return effect_of(self.field)


def effect_of(field: str) -> Effect:
    """What a change of a field does.

    Args:
        field: dotted name, e.g. `training.steps`, `mixers.attention.window`, `retrieval.lengths`.

    Raises:
        KeyError: it is no field.
    """
    section = field.partition(".")[0]
    if section == "mixers":
        return Effect.PAST
    return Effect.MEASURED if section in OF_SUITES else EFFECTS[field]


def is_field(name: str) -> bool:
    """Whether this version knows a field of this dotted name, as far as mixers and suites need not be loaded for it."""
    return name in EFFECTS or name.partition(".")[0] in ("mixers", *OF_SUITES)


def makes_a_recipe(field: str) -> bool:
    """Whether runs that differ in this field are of different recipes, and not seeds of one."""
    return field != SEED and effect_of(field) not in (Effect.NOTHING, Effect.MEASURED)


def flat(config: RunConfig | Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a configuration by its dotted name, as plain values.

    Args:
        config: a configuration, or its plain tree as YAML gives it. What an older schema lacks in it has the default
            of today's; fields that today's does not know are left out. Mixers are those that the pattern names.

    Returns:
        Values by field, credentials in addresses redacted: they are kept in checkpoints, and shown.
    """
    tree = TypeAdapter(RunConfig).dump_python(config, mode="json") if isinstance(config, RunConfig) else config
    tree = redacted_tree(tree)
    fields = dict(_schema_fields(tree))
    fields["model.pattern"] = "".join(fields["model.pattern"].split())
    for mixer in dict.fromkeys(parse_pattern(fields["model.pattern"])):
        given = (tree.get("mixers") or {}).get(mixer) or {}
        fields |= {f"mixers.{mixer}.{name}": value for name, value in given.items()}
    for suite in OF_SUITES:
        fields |= {f"{suite}.{name}": value for name, value in (tree.get(suite) or {}).items()}
    return fields


def with_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as `flat` gave them, with the defaults of those that the schema did not have then.

    As in `flat`, fields that today's schema does not know are left out.
    """
    return {**dict(_schema_fields({})), **{name: value for name, value in fields.items() if is_field(name)}}


def _schema_fields(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, kind in sections(RunConfig).items():
        given = tree.get(section) or {}
        for field in dataclasses.fields(kind):
            yield f"{section}.{field.name}", given[field.name] if field.name in given else _default(field)


def _default(field: dataclasses.Field[Any]) -> Any:
    """A field's default; None for one that must be given."""
    default = field.default
    if isinstance(default, FieldInfo):
        default = default.get_default(call_default_factory=True)
    elif default is dataclasses.MISSING:
        default = None if field.default_factory is dataclasses.MISSING else field.default_factory()
    return default


def changes(
    before: Mapping[str, Any], after: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> list[Change]:
    """Fields that differ, in the schema's order; of fields that follow from one that differs, that one alone.

    Args:
        before: see `flat`.
        after: see `flat`.
        defaults: of mixers' fields, by dotted name, for configurations that were written before there were these.
    """
    known = defaults or {}
    found = [
        Change(field, before.get(field, known.get(field)), after.get(field, known.get(field)))
        for field in dict.fromkeys([*after, *before])
    ]
    differing = [one for one in found if not _equal(one.before, one.after)]
    names = {one.field for one in differing}
    return [one for one in differing if not names.intersection(DERIVED.get(one.field, ()))]


def _equal(one: Any, other: Any) -> bool:
    """Equal as JSON is: a tuple is a list; a bool is no number."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)
