"""Traits of mixers. Each mixer declares its own; config, planning and model read them without importing a mixer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class MixerTraits:
    """Capabilities and requirements of a mixer, identical for all settings of it.

    Attributes:
        supports_kv_gather: True if context-parallel ranks may all-gather keys and values where the head groups are not
            a multiple of their number.
        supports_state_passing: True if context-parallel ranks may keep the sequence sharded and pass recurrent states
            to the next.
        chunk_field: field of the mixer's settings with the size of the selected chunks that context-parallel ranks
            fetch from each other. None: it fetches no chunks.
        head_groups_are_query_groups: True if a head group is a query group, False if it is a head.
        needs_all_head_groups: True if one call of `Mixer.mix` must contain all head groups, because their features
            depend on each other.
        supports_document_masking: True if only `Mixer.mix` accesses earlier positions, so that one call per document
            isolates the documents of a packed sample.
        shifts_tokens: True if the mixer itself combines each token's hidden state with the previous token's; see
            `rwkv7_block`.
    """

    supports_kv_gather: bool = False
    supports_state_passing: bool = False
    chunk_field: str | None = None
    head_groups_are_query_groups: bool = False
    needs_all_head_groups: bool = False
    supports_document_masking: bool = False
    shifts_tokens: bool = False


class RegisteredMixer(Protocol):
    """Part of a `MixerEntry` of the mixer registry that the configuration reads."""

    @property
    def config_type(self) -> type:
        """Pydantic dataclass made with `schema.STRICT`, with the fields of `mixers.<name>`."""
        ...

    @property
    def traits(self) -> MixerTraits:
        """Traits of the mixer."""
        ...


Mixers = Mapping[str, RegisteredMixer]
"""Mixers by their name in `model.pattern`."""


def fetched_chunk_size(mixer: RegisteredMixer, fields: Mapping[str, Any]) -> int | None:
    """Return the tokens of a chunk that a mixer can fetch from another rank, or None if it fetches none.

    The rank that holds a chunk must hold it whole.

    Args:
        mixer: the mixer.
        fields: the mixer's own configuration, `mixers.<name>`.
    """
    field = mixer.traits.chunk_field
    if field is None:
        return None
    size: int = getattr(mixer.config_type(**fields), field)
    return size
