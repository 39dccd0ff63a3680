"""Megatron's token files, .bin/.idx."""

from __future__ import annotations

from data_prep.reading.registry import Format, Reader, add
from data_prep.tokenization.vocabularies import TextTokenizer


def _reader(tokenizer: TextTokenizer | None) -> Reader:
    from data_prep.reading.indexed import IndexedReader  # imports Megatron and torch, only needed here

    assert tokenizer is not None, "`open_files` has checked it"
    return IndexedReader(tokenizer)


# Megatron opens no other spelling than .idx.
add(Format(suffixes=(".idx",), open_reader=_reader, has_tokens=True, companion=".bin", case_sensitive=True))
