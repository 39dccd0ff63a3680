"""What the configuration must know of a mixer. The registry of mixers satisfies it; config imports no mixer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class MixerTraits(Protocol):
    """The part of a registered mixer that reading and checking a configuration needs.

    Attributes:
        config_type: a pydantic dataclass made with `schema.STRICT`: the fields of `mixers.<name>`.
        gathers_keys_and_values: True: under context parallelism the mixer can all-gather keys and values where its
            heads do not divide by the context-parallel size; False: its heads must divide.
        hands_on_states: True: it can hand states on instead, from part to part of the sequence.
        chunk_field: the field of `config_type` with the size of the chunks that it can fetch instead, those that were
            chosen; None: it fetches none.
        units_are_groups: True: what is handed to another rank is a query group; False: a head.
        keeps_documents_apart: True: the mixer can keep a token from other documents of its sample.
    """

    @property
    def config_type(self) -> type:
        """The dataclass of the mixer's fields."""
        ...

    @property
    def gathers_keys_and_values(self) -> bool:
        """Whether keys and values can be gathered over the context-parallel ranks."""
        ...

    @property
    def hands_on_states(self) -> bool:
        """Whether states can be handed on along the context-parallel ranks."""
        ...

    @property
    def chunk_field(self) -> str | None:
        """The field with the size of the chunks that can be fetched."""
        ...

    @property
    def units_are_groups(self) -> bool:
        """Whether a unit is a query group."""
        ...

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a token can be kept from other documents of its sample."""
        ...


Mixers = Mapping[str, MixerTraits]
"""Mixers by the name that `model.pattern` uses."""


def fetched_chunk_size(mixer: MixerTraits, fields: Mapping[str, Any]) -> int | None:
    """Tokens of a chunk that a mixer can fetch from another rank, which must hold it whole; None: it fetches none.

    Args:
        mixer: what is known of it.
        fields: of its own configuration, `mixers.<name>`.
    """
    if mixer.chunk_field is None:
        return None
    size: int = getattr(mixer.config_type(**fields), mixer.chunk_field)
    return size
