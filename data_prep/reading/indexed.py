"""Conversion of Megatron's token files (.bin/.idx) to text, and of a prepared folder to such files.

This is the only module of `data_prep` that imports Megatron. Megatron's own code reads and writes the format.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import fsspec
import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

from data_prep.documents import Advance, MalformedError, Problems, check_length
from data_prep.manifest import DomainEntry, Manifest, verify_shard
from data_prep.reading.fields import Fields, Found
from data_prep.reading.inputs import InputFile
from data_prep.tokenization.vocabularies import TextTokenizer
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import printable
from megatron_ext.utils.temp_dirs import scratch_folder

SPECIAL_TOKENS, SPLIT_AT_END = "special_tokens", "parted"
"""Changes of a text: special tokens were removed, or the document was split at end-of-document tokens."""


class IndexedReader:
    """Reader of the documents of one .bin/.idx pair.

    Special tokens are identified by their ids and are removed. An end-of-document token inside a document splits the
    document, because some tools pack several documents into one document of the index. The removal of a special token
    counts as a change of the text, except for an end-of-document token at the end.

    Args:
        tokenizer: tokenizer that made the tokens.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        end = tokenizer.find_end()
        self._end = None if end is None else end[1]
        self._special = np.array(sorted({*tokenizer.special, *(() if end is None else end[1:])}), np.int64)

    def __call__(self, file: InputFile, fields: Fields, problems: Problems, advance: Advance) -> Iterator[Found]:
        """Yield every well-formed document. The domain is `fields.default`, or is derived from the file name."""
        with _local_prefix(file) as prefix:
            dataset = _open(file, prefix, problems)
            if dataset is not None:
                yield from self._read(dataset, file, fields.default or _domain_of(file), problems, advance)

    def _read(
        self, dataset: IndexedDataset, file: InputFile, domain: str, problems: Problems, advance: Advance
    ) -> Iterator[Found]:
        total, number = len(dataset.document_indices) - 1, 0
        try:
            for number, (start, count) in enumerate(_documents(dataset), start=1):
                advance(file.size * number // total - file.size * (number - 1) // total)
                try:
                    for part_suffix, text, changes in self._texts(dataset, start, count):
                        yield Found(f":{number}{part_suffix}", text, domain, changes)
                except MalformedError as error:
                    problems.report(file.location, number, error.reason, error.detail)
        except BrokenIndexError as error:
            problems.report(file.location, number + 1, "does not fit its .bin", str(error))

    def _texts(self, dataset: IndexedDataset, start: int, count: int) -> Iterator[tuple[str, str, tuple[str, ...]]]:
        """Yield (suffix of the document id, text, changes) for each text in one document of the index."""
        check_length(count, "tokens")
        tokens = dataset.bin_reader.read(dataset.index.dtype, count, start)
        unknown = tokens[(tokens < 0) | (tokens >= self._tokenizer.vocab_size)]
        if len(unknown):
            detail = f"token id {unknown[0]}, but the vocabulary has {self._tokenizer.vocab_size} ids"
            raise MalformedError("not the tokens of --source-tokenizer", detail)
        if self._end is not None and count and tokens[-1] == self._end:
            tokens = tokens[:-1]
        is_special = np.isin(tokens, self._special)
        ends = np.flatnonzero(tokens == self._end) if self._end is not None else np.empty(0, np.int64)
        texts = [
            self._tokenizer.decode(part[~special].tolist())
            for part, special in zip(np.split(tokens, ends), np.split(is_special, ends), strict=True)
        ]
        parts = [(part_number, text) for part_number, text in enumerate(texts, start=1) if text.strip()]
        if not parts:
            raise MalformedError("no text")
        changes: tuple[str, ...] = (SPECIAL_TOKENS,) if is_special.any() else ()
        changes += (SPLIT_AT_END,) if len(parts) > 1 else ()
        for part_number, text in parts:
            check_length(len(text))
            yield (f".{part_number}" if len(parts) > 1 else ""), text, changes


class BrokenIndexError(ValueError):
    """Error for an index that is inconsistent or does not match its .bin."""


class _Dataset(IndexedDataset):
    """Megatron's dataset without its `__del__`, which prints an error if the files could not be opened."""

    def __del__(self) -> None:
        for name in ("bin_reader", "index"):
            self.__dict__.pop(name, None)


def _documents(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Yield (byte offset of the first token, number of tokens) of every document.

    Megatron writes sequences one after the other, and documents in the order of their sequences.

    Raises:
        BrokenIndexError: the index deviates from this order, or does not match the size of the .bin file.
    """
    lengths, starts, bounds = dataset.sequence_lengths, dataset.index.sequence_pointers, dataset.document_indices
    size = Path(f"{dataset.path_prefix}.bin").stat().st_size
    if bounds[0] != 0:
        raise BrokenIndexError(f"the first document starts at sequence {bounds[0]}, not 0")
    end = 0
    for first, last in itertools.pairwise(map(int, bounds)):
        if not first <= last <= len(lengths):
            raise BrokenIndexError(f"a document has the sequences {first} to {last}, but there are {len(lengths)}")
        start = end
        for sequence in range(first, last):
            if starts[sequence] != end or lengths[sequence] < 0:
                where = f"sequence {sequence} has {lengths[sequence]} tokens starting at byte {starts[sequence]}"
                raise BrokenIndexError(f"{where}, but the previous one ends at {end}")
            end += int(lengths[sequence]) * dataset.index.dtype_size
        if end > size:
            raise BrokenIndexError(f"a document has the bytes {start} to {end}, but the .bin has {size}")
        yield start, (end - start) // dataset.index.dtype_size
    if end < size:
        raise BrokenIndexError(f"the last document ends at byte {end}, but the .bin has {size}")


@contextmanager
def _local_prefix(file: InputFile) -> Iterator[str]:
    """Context manager that yields the local path of a .bin/.idx pair, without suffix.

    Megatron memory-maps the files. A pair at a URL is therefore copied to a local disk first. The copy is removed at
    the end.
    """
    if file.is_local:
        yield file.location.removesuffix(".idx")
        return
    with scratch_folder("pair") as folder:
        system, path = fsspec.core.url_to_fs(file.location)
        for suffix in (".idx", ".bin"):
            source = f"{path.removesuffix('.idx')}{suffix}"
            if system.exists(source):
                system.get_file(source, f"{folder}/pair{suffix}")
        yield f"{folder}/pair"


def _open(file: InputFile, prefix: str, problems: Problems) -> IndexedDataset | None:
    if not IndexedDataset.exists(prefix):
        problems.report(file.location, None, "has no .bin beside it")
        return None
    if not Path(f"{prefix}.bin").stat().st_size:  # an empty file cannot be memory-mapped
        problems.report(file.location, None, "has an empty .bin beside it")
        return None
    try:
        return _Dataset(prefix)
    except (AssertionError, OSError, OverflowError, ValueError, struct.error) as error:
        problems.report(file.location, None, "not an index of Megatron's", str(error))
        return None


def _domain_of(file: InputFile) -> str:
    """Derive the domain from the name of a file of Megatron's preprocess_data: `C4_text_document.idx` -> `C4`."""
    return printable(PurePosixPath(file.name).stem).removesuffix("_document").removesuffix("_text")


def export(root: Path, manifest: Manifest, prefix: Path) -> list[Path]:
    """Write a prepared folder as `<prefix>_<split>_<domain>_text_document.bin` and `.idx`.

    A document is one sequence and ends with the end-of-document token, as with Megatron's `preprocess_data
    --append-eod`. Megatron chooses the token type by the vocabulary size.

    Args:
        root: folder of the manifest.
        manifest: the manifest; shards are checked against it while they are read.
        prefix: prefix of the file names.

    Returns:
        The written prefixes, for Megatron's `--data-path`.

    Raises:
        UserError: a shard is damaged, or an output file already exists.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    return [_export_domain(root, manifest, entry, prefix) for entry in manifest.domains]


def _export_domain(root: Path, manifest: Manifest, entry: DomainEntry, prefix: Path) -> Path:
    target = prefix.with_name(f"{prefix.name}_{entry.split}_{entry.domain}_text_document")
    binary, index = target.with_name(f"{target.name}.bin"), target.with_name(f"{target.name}.idx")
    for path in (binary, index):
        if path.exists():
            raise UserError(str(path), "already exists", "choose another prefix or remove it")
    # The files have other names until they are complete. The index, which makes the pair readable, is renamed last.
    partial_paths = [path.with_name(f"{path.name}.partial") for path in (binary, index)]
    try:
        _build(root, manifest, entry, *partial_paths)
        partial_paths[0].rename(binary)
        partial_paths[1].rename(index)
    finally:
        for path in partial_paths:
            path.unlink(missing_ok=True)
    return target


def _build(root: Path, manifest: Manifest, entry: DomainEntry, binary: Path, index: Path) -> None:
    builder = IndexedDatasetBuilder(str(binary), dtype=DType.optimal_dtype(manifest.tokenizer.vocab_size))
    for shard in entry.shards:
        verify_shard(root, shard, "sha256")
        content = np.memmap(root / shard.file, np.uint8, mode="r")
        for offset, count in np.load(root / shard.index):
            size = int(count) * np.dtype(manifest.dtype).itemsize
            tokens = content[int(offset) : int(offset) + size].view(np.dtype(manifest.dtype).newbyteorder("<"))
            builder.add_document(torch.from_numpy(tokens.astype(np.int64)), [int(count)])
    builder.finalize(str(index))
