"""Properties of mixers that the configuration needs. The mixer registry provides them, so config imports no mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class MixerTraits(Protocol):
    """Properties of a registered mixer that are needed to read and check a configuration.

    Attributes:
        config_type: a pydantic dataclass made with `schema.STRICT`, with the fields of `mixers.<name>`.
        supports_kv_gather: True: under context parallelism the mixer can all-gather keys and values if its heads
            are not a multiple of the context-parallel size. False: its heads must be a multiple.
        supports_state_passing: True: the mixer can instead send recurrent states from each part of the sequence to the
            next.
        chunk_field: field of `config_type` with the size of the selected chunks that the mixer can fetch instead. None:
            it fetches no chunks.
        head_groups_are_query_groups: True: ranks exchange whole query groups. False: heads.
        supports_document_masking: True: the mixer can isolate the documents of a packed sample.
    """

    @property
    def config_type(self) -> type:
        """Dataclass of the mixer's fields."""
        ...

    @property
    def supports_kv_gather(self) -> bool:
        """Support for all-gathering keys and values over the context-parallel ranks."""
        ...

    @property
    def supports_state_passing(self) -> bool:
        """Support for sending recurrent states along the context-parallel ranks."""
        ...

    @property
    def chunk_field(self) -> str | None:
        """Field with the size of the chunks that can be fetched."""
        ...

    @property
    def head_groups_are_query_groups(self) -> bool:
        """True if the unit of exchange is a query group."""
        ...

    @property
    def supports_document_masking(self) -> bool:
        """Support for isolating the documents of a packed sample."""
        ...


Mixers = Mapping[str, MixerTraits]
"""Mixers by their name in `model.pattern`."""


def fetched_chunk_size(mixer: MixerTraits, fields: Mapping[str, Any]) -> int | None:
    """Return the tokens of a chunk that a mixer can fetch from another rank, or None if it fetches none.

    The rank that holds a chunk must hold it whole.

    Args:
        mixer: traits of the mixer.
        fields: the mixer's own configuration, `mixers.<name>`.
    """
    if mixer.chunk_field is None:
        return None
    size: int = getattr(mixer.config_type(**fields), mixer.chunk_field)
    return size
