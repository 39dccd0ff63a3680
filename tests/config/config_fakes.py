"""Fakes of the registered mixers, so that configuration tests import no mixer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked

from megatron_ext.config.load import load_config, resolve
from megatron_ext.config.schema import STRICT, RunConfig
from megatron_ext.config.traits import MixerTraits
from megatron_ext.config.validate import validate

EXAMPLES = Path(__file__).parents[2] / "examples"


@checked(frozen=True, kw_only=True, config=STRICT)
class AttentionConfig:
    window: PositiveInt | None = None
    temperature: PositiveFloat = 1.0


@checked(frozen=True, kw_only=True, config=STRICT)
class Top1ElementConfig(AttentionConfig):
    position_encoding: Literal["rope", "learned"] = "rope"


@checked(frozen=True, kw_only=True, config=STRICT)
class Top1ChunkConfig:
    chunk_size: PositiveInt = 128
    score: Literal["approx", "exact", "exact_lse"] = "exact"


@checked(frozen=True, kw_only=True, config=STRICT)
class StatefulConfig:
    conv_size: PositiveInt = 4


GATHERING = MixerTraits(supports_kv_gather=True, supports_document_masking=True)


@dataclass(frozen=True)
class FakeMixer:
    config_type: type
    traits: MixerTraits = GATHERING


MIXERS = {
    "attention": FakeMixer(AttentionConfig),
    "top1_chunk": FakeMixer(Top1ChunkConfig, replace(GATHERING, chunk_field="chunk_size")),
    "top1_element": FakeMixer(Top1ElementConfig),
    "gated_deltanet": FakeMixer(StatefulConfig, MixerTraits(supports_document_masking=True)),
    "rwkv6": FakeMixer(StatefulConfig, MixerTraits(supports_kv_gather=True)),
    "retnet": FakeMixer(
        StatefulConfig,
        MixerTraits(supports_state_passing=True, head_groups_are_query_groups=True, supports_document_masking=True),
    ),
}


def config_of(**sections: Any) -> RunConfig:
    """Build a complete configuration from plain sections, with a default `data.path`."""
    sections["data"] = {"path": "somewhere"} | sections.get("data", {})
    return resolve(validate(RunConfig, sections), MIXERS)


def load(text: str, folder: Path, *overrides: str) -> RunConfig:
    """Write YAML text to a file and load it as a configuration."""
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, overrides, MIXERS)
