"""Traits of the built-in mixers, as a table."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from built_in import MIXERS

from megatron_ext.mixers.core.registry import load_all

NONE = {
    "supports_kv_gather": False,
    "supports_state_passing": False,
    "chunk_field": None,
    "head_groups_are_query_groups": False,
    "needs_all_head_groups": False,
    "supports_document_masking": False,
    "shifts_tokens": False,
}
KEY_VALUE = {"supports_kv_gather": True, "head_groups_are_query_groups": True, "supports_document_masking": True}
STATEFUL = {"supports_state_passing": True, "supports_document_masking": True}
RWKV = {"supports_state_passing": True, "shifts_tokens": True}
TRAITS: dict[str, dict[str, Any]] = {
    "attention": KEY_VALUE,
    "based": STATEFUL,
    "deltanet": STATEFUL,
    "gated_deltanet": STATEFUL,
    "gla": STATEFUL,
    "linear_attention": STATEFUL,
    "mamba": STATEFUL | {"needs_all_head_groups": True},
    "mamba2": STATEFUL | {"head_groups_are_query_groups": True},
    "moba": KEY_VALUE | {"chunk_field": "block_size"},
    "nsa": KEY_VALUE,
    "retnet": STATEFUL,
    "rwkv6": RWKV,
    "rwkv7": RWKV,
    "top1_chunk": KEY_VALUE | {"chunk_field": "chunk_size"},
    "top1_element": KEY_VALUE,
}


def test_all_mixers_are_in_traits_table() -> None:
    assert set(TRAITS) == MIXERS


@pytest.mark.parametrize("name", TRAITS)
def test_traits(name: str) -> None:
    assert asdict(load_all()[name].traits) == NONE | TRAITS[name]
