"""Last step of a task: documents to tokens, tokens to shards, and a record of the result."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from pydantic import TypeAdapter

from data_prep.documents import REPAIR_HINT, SPLITS, Problems
from data_prep.ledger import Ledger
from data_prep.manifest import CountEntry, DomainEntry, SkippedEntry, TokenizerEntry, UnusedEntry
from data_prep.output.shards import DomainWriter
from data_prep.running.progress import ProgressBoard
from data_prep.storage import locked
from data_prep.tokenization.pieces import PIECE_CHARACTERS, NoCutError, encode_by_parts
from data_prep.tokenization.tokenizer import NoTokenError
from data_prep.tokenization.vocabularies import TextTokenizer, load_saved_tokenizer, token_dtype, unencodable_part
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.json_text import parse_json

BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 500_000
"""Limits of a batch. The tokenizer library uses up to 200 bytes per byte of a batch; larger ones are not faster."""

END_TOKEN_REASON = "some of its text is encoded as the end-of-document token"
TOKENIZER_HINT = "give a byte-level tokenizer, which encodes any text,"


@dataclass(frozen=True)
class TaskResult:
    """Result of one task.

    Attributes:
        domains: shards by split and domain, with paths relative to the task's folder.
        skipped: skipped malformed records.
        left_out: dropped well-formed documents.
        changed: documents changed by cleaning.
        unused: documents that no split uses.
    """

    domains: list[DomainEntry]
    skipped: list[SkippedEntry]
    left_out: list[CountEntry]
    changed: list[CountEntry]
    unused: list[UnusedEntry]


class WriteShards(PipelineStep):
    """Step that tokenises documents and writes them to `<folder>/<task>/<split>/<domain>/`.

    At the end, the step writes its `TaskResult` to `<folder>/<task>.json`.

    Args:
        folder: output folder of the tasks.
        root: folder of the tokenizer.
        tokenizer: entry of the tokenizer in the manifest.
        shard_tokens: see `DomainWriter`.
        problems: handling of malformed records, shared with the reading step. It also receives the texts that the
            tokenizer cannot encode.
        ledger: counts of the documents that earlier steps dropped or changed.
        board: progress board, which receives the number of tokens written.
    """

    type = "WRITER"
    name = "shards"

    def __init__(
        self,
        folder: Path,
        root: Path,
        tokenizer: TokenizerEntry,
        shard_tokens: int,
        problems: Problems,
        ledger: Ledger,
        board: ProgressBoard,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.root = root
        self.tokenizer = tokenizer
        self.shard_tokens = shard_tokens
        self.problems = problems
        self.ledger = ledger
        self.board = board

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Consume the documents of a task, unless another process has done so in the meantime."""
        result_path = self.folder / f"{rank:05d}.json"
        with locked(result_path.with_suffix(".lock")):
            if not result_path.exists():
                target = self.folder / f"{rank:05d}"
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                domains = self._write(data, target, rank)
                result = TaskResult(
                    domains,
                    _skipped(self.problems),
                    left_out=count_entries(self.ledger.left_out),
                    changed=count_entries(self.ledger.changed),
                    unused=unused_entries(self.ledger.unused),
                )
                write_atomically(result_path, json.dumps(asdict(result), ensure_ascii=False).encode())
        yield from ()

    def _write(self, data: Iterable[Document], target: Path, rank: int) -> list[DomainEntry]:
        encode = DocumentEncoder(load_saved_tokenizer(self.root, self.tokenizer), self.tokenizer, self.problems)
        writers: dict[tuple[str, str], DomainWriter] = {}
        written = self.board.token_counter(rank)
        with contextlib.ExitStack() as stack:
            for batch in _batches(data):
                for document, tokens in encode(batch):
                    key = (document.metadata["split"], document.metadata["domain"])
                    if key not in writers:
                        writers[key] = DomainWriter(target, *key, self.shard_tokens, prefix=f"{rank:05d}-")
                        stack.callback(writers[key].abandon)
                    writers[key].add(document, tokens)
                    written[0] += len(tokens)
            return [writers[key].close() for key in sorted(writers, key=manifest_order)]


class DocumentEncoder:
    """Encoder of whole documents to little-endian arrays that end with the end-of-document token.

    Args:
        tokenizer: tokenizer that encodes the text.
        entry: entry of the tokenizer in the manifest.
        problems: receives documents with text that the tokenizer cannot encode, or that it encodes as the
            end-of-document token. Such documents are dropped.
    """

    def __init__(self, tokenizer: TextTokenizer, entry: TokenizerEntry, problems: Problems) -> None:
        self._tokenizer = tokenizer
        self._end = entry.eos_id
        self._dtype = np.dtype(token_dtype(entry.vocab_size)).newbyteorder("<")
        self._problems = problems

    def __call__(self, documents: list[Document]) -> Iterator[tuple[Document, npt.NDArray[np.unsignedinteger]]]:
        """Yield the documents that can be encoded, with their tokens."""
        for document, ids in self._encode(documents):
            if self._tokenizer.unknown is not None and self._tokenizer.unknown in ids:
                self._report_unencodable(document)
                continue
            ids.append(self._end)
            tokens = np.fromiter(ids, self._dtype, len(ids))
            if (tokens[:-1] == self._end).any():
                self._report(document, END_TOKEN_REASON)
                continue
            yield document, tokens

    def _encode(self, documents: list[Document]) -> Iterator[tuple[Document, list[int]]]:
        encode = self._tokenizer.encode_batch
        if len(documents[0].text) <= PIECE_CHARACTERS:
            with contextlib.suppress(NoTokenError):  # on failure, encode one by one to find the affected documents
                yield from zip(documents, encode([document.text for document in documents]), strict=True)
                return
        for document in documents:
            try:
                yield document, encode_by_parts(encode, document.text)
            except NoCutError as error:
                self._problems.report(document.metadata["source"], None, "too long", f"{document.id}: {error}")
            except NoTokenError:
                self._report_unencodable(document)

    def _report_unencodable(self, document: Document) -> None:
        detail = ""
        if self._problems.on_error == "stop":  # the detail is only shown in an error message
            detail = f"for example {unencodable_part(self._tokenizer, document.text)!r}"
        self._report(document, "the tokenizer has no token for its text", detail, TOKENIZER_HINT)

    def _report(self, document: Document, reason: str, detail: str = "", hint: str = REPAIR_HINT) -> None:
        source = document.metadata["source"]
        location = document.id.removeprefix(source).removeprefix(":") or None
        self._problems.report(source, location, reason, detail, hint)


def load_result(path: Path) -> TaskResult:
    """Read the result that `WriteShards` wrote."""
    return TypeAdapter(TaskResult).validate_python(parse_json(read_regular(path)))


def manifest_order(key: tuple[str, str]) -> tuple[int, str]:
    """Sort key of (split, domain or reason) in the manifest's order: train, validation, test, then by name."""
    return SPLITS.index(key[0]), key[1]


def count_entries(counts: Mapping[tuple[str, str], int]) -> list[CountEntry]:
    """Return counts by (split, reason) as entries, train before validation before test."""
    return [CountEntry(*key, counts[key]) for key in sorted(counts, key=manifest_order)]  # type: ignore[arg-type]


def unused_entries(counts: Mapping[tuple[str, str], int]) -> list[UnusedEntry]:
    """Return counts by (domain, reason) as entries, sorted by name."""
    return [UnusedEntry(*key, counts[key]) for key in sorted(counts)]


def _skipped(problems: Problems) -> list[SkippedEntry]:
    return [SkippedEntry(file, reason, count) for (file, reason), count in sorted(problems.counts.items())]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield batches of documents for the tokenizer. A document that is encoded in pieces has a batch of its own."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        if batch and (len(batch) >= BATCH_DOCUMENTS or characters + len(document.text) > BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document.text)
    if batch:
        yield batch
