"""From raw documents to tokenised shards: the work behind `selectron prepare`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer
from tqdm import tqdm

from data_prep import embedded
from data_prep.documents import SPLITS, Advance, Corpus, Document, Problems, ignore_progress, open_files
from data_prep.manifest import (
    TOKENIZER_NAME,
    VERSION,
    DomainEntry,
    Manifest,
    SkippedEntry,
    TokenizerEntry,
    match_domain,
    save_manifest,
)
from data_prep.shards import DomainWriter
from data_prep.storage import sha256_of, whole_folder
from data_prep.tokenizer import (
    DocumentEncoder,
    end_of_document,
    load_tokenizer,
    token_dtype,
    train_tokenizer,
    vocabulary_size,
)
from megatron_ext.errors import UserError
from megatron_ext.files import force_to_disk

EMBEDDED = "embedded"
TRAIN_TOKENIZER = "train"
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 2_000_000
FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_ .+-]*")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What `selectron prepare` is asked to do.

    Attributes:
        input: file or folder of documents, or `embedded`.
        output: folder to make.
        train_domains: domains of the train and validation splits.
        test_domains: domains of the test split; none of the training domains.
        tokenizer: a tokenizer.json, or `train`: train one on the train split.
        eos_token: end-of-document token; None: the tokenizer's usual one.
        vocab_size: of a tokenizer trained here.
        validation_fraction: share of the training documents held out, where folders do not give the split.
        on_error: stop at a malformed record, or skip and count it.
        shard_tokens: tokens a shard.
        workers: threads that tokenise; the result does not depend on them.
        progress: show a progress bar on standard error.
    """

    input: str
    output: str
    train_domains: list[str]
    test_domains: list[str] = field(default_factory=list)
    tokenizer: str = TRAIN_TOKENIZER
    eos_token: str | None = None
    vocab_size: int = 4096
    validation_fraction: float = 0.02
    on_error: Literal["stop", "skip"] = "stop"
    shard_tokens: int = 64_000_000
    workers: int = 1
    progress: bool = True


@dataclass(frozen=True)
class SplitPlan:
    """Which split a document belongs to.

    Attributes:
        train: training domains.
        test: test domains.
        folders: splits that the input's folders give.
        validation_fraction: share of the training documents held out by hash, where no folder says.
    """

    train: frozenset[str]
    test: frozenset[str]
    folders: frozenset[str]
    validation_fraction: float

    def split_of(self, document: Document) -> str | None:
        """The document's split; None: it is not used.

        Of a corpus split by folders, test domains are read from `test` alone (without it: from `validation`), training
        domains never from `test`. The hash is of the text, so that equal texts cannot stand on both sides.
        """
        if document.domain in self.test:
            given = next((name for name in ("test", "validation") if name in self.folders), None)
            return "test" if given is None or document.folder == given else None
        if document.domain not in self.train or document.folder == "test":
            return None
        if document.folder == "validation" or (document.folder == "train" and "validation" in self.folders):
            return document.folder
        return "validation" if _hash(document.text) < self.validation_fraction * 2.0**64 else "train"


def prepare(options: PrepareOptions) -> Manifest:
    """Make the folder `options.output`: shards, tokenizer.json, and last the manifest.

    The folder appears whole or not at all. The same input and options give the same bytes.

    Raises:
        UserError: an option, a record or a file is at fault, or the disk is full.
    """
    _check(options)
    # Read once by the tokenizer library, when it first runs in parallel.
    os.environ["RAYON_NUM_THREADS"] = str(options.workers)
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    output = Path(options.output)
    try:
        with whole_folder(output) as partial:
            return _fill(partial, options)
    except OSError as error:
        where = str(error.filename or output)
        raise UserError(where, f"cannot be read or written ({error.strerror})", "free space or mend the path") from None


def open_corpus(source: str) -> Corpus:
    """The corpus that `--input` names."""
    return embedded.EmbeddedCorpus() if source == EMBEDDED else open_files(Path(source))


def find_domains(corpus: Corpus, names: list[str], option: str) -> list[str]:
    """The corpus's own spelling of the domains asked for.

    Reads documents until every name has been seen, so only a wrong name costs a whole pass.

    Raises:
        UserError: a name is unknown; the domains that exist are listed.
    """
    present: dict[str, None] = {}
    missing = list(names)
    for document in corpus.documents(Problems("skip")):
        if document.domain not in present:
            present[document.domain] = None
            missing = [name for name in names if match_domain(name, present) is None]
        if not missing:
            return [match for name in dict.fromkeys(names) if (match := match_domain(name, present))]
    there = ", ".join(sorted(present)) or "none"
    raise UserError(option, f"unknown domain {missing[0]}", f"choose from the domains of the input: {there}")


def _check(options: PrepareOptions) -> None:
    for name, value in (("--shard-tokens", options.shard_tokens), ("--workers", options.workers)):
        if value < 1:
            raise UserError(name, f"{value} is not positive", "give 1 or more")
    if not 0 <= options.validation_fraction < 1:
        problem = f"{options.validation_fraction} is no fraction"
        raise UserError("--validation-fraction", problem, "give 0 or more, below 1")
    if not options.train_domains:
        raise UserError("--train-domains", "no domain is given", "name one or more, separated by commas")
    for name in (*options.train_domains, *options.test_domains):
        if not FOLDER_NAME.fullmatch(name):
            raise UserError("--train-domains/--test-domains", f"{name!r} cannot name a folder", "rename the domain")


def _fill(root: Path, options: PrepareOptions) -> Manifest:
    corpus = open_corpus(options.input)
    plan = _plan(corpus, options)
    tokenizer = _tokenizer(corpus, plan, options)
    entry = _keep_tokenizer(root, tokenizer, options)
    dtype = token_dtype(entry.vocab_size)
    problems = Problems(options.on_error)
    documents = _Assigned(corpus, plan, problems)
    domains = _write(root, documents, DocumentEncoder(tokenizer, entry.eos_id, dtype), options)
    _check_nothing_missing(plan, domains)
    manifest = Manifest(
        version=VERSION,
        tokenizer=entry,
        dtype=dtype,  # type: ignore[arg-type]
        domains=domains,
        skipped=[SkippedEntry(file, reason, number) for (file, reason), number in sorted(problems.counts.items())],
        duplicates=documents.duplicates,
        options=_recorded(options),
        provenance=corpus.provenance(),
    )
    save_manifest(root, manifest)
    return manifest


def _plan(corpus: Corpus, options: PrepareOptions) -> SplitPlan:
    both = [name for name in options.train_domains if match_domain(name, options.test_domains)]
    if both:
        problem = f"{', '.join(both)} is a training domain and a test domain"
        raise UserError("--test-domains", problem, "take it out of one of the two")
    train = find_domains(corpus, options.train_domains, "--train-domains")
    test = find_domains(corpus, options.test_domains, "--test-domains") if options.test_domains else []
    return SplitPlan(frozenset(train), frozenset(test), corpus.folders, options.validation_fraction)


def _tokenizer(corpus: Corpus, plan: SplitPlan, options: PrepareOptions) -> Tokenizer:
    if options.tokenizer != TRAIN_TOKENIZER:
        return load_tokenizer(Path(options.tokenizer))
    texts = (item.text for item in corpus.documents(Problems(options.on_error)) if plan.split_of(item) == "train")
    return train_tokenizer(texts, options.vocab_size)


def _keep_tokenizer(root: Path, tokenizer: Tokenizer, options: PrepareOptions) -> TokenizerEntry:
    """Copy the user's file to the letter, or write the trained one."""
    path = root / TOKENIZER_NAME
    token, eos_id = end_of_document(tokenizer, options.eos_token)
    if options.tokenizer == TRAIN_TOKENIZER:
        path.write_text(tokenizer.to_str(), encoding="utf-8")
    else:
        path.write_bytes(Path(options.tokenizer).read_bytes())
    force_to_disk(path)
    return TokenizerEntry(TOKENIZER_NAME, sha256_of(path), vocabulary_size(tokenizer), token, eos_id)


class _Assigned:
    """The used documents with their splits, exact duplicates left out (8 bytes of hash a document are kept)."""

    def __init__(self, corpus: Corpus, plan: SplitPlan, problems: Problems) -> None:
        self.corpus = corpus
        self.duplicates = 0
        self._plan = plan
        self._problems = problems

    def read(self, advance: Advance = ignore_progress) -> Iterator[tuple[str, Document]]:
        seen: set[int] = set()
        for document in self.corpus.documents(self._problems, advance):
            split = self._plan.split_of(document)
            if split is None:
                continue
            fingerprint = _hash(document.text)
            if fingerprint in seen:
                self.duplicates += 1
                continue
            seen.add(fingerprint)
            yield split, document


def _write(root: Path, documents: _Assigned, encode: DocumentEncoder, options: PrepareOptions) -> list[DomainEntry]:
    writers: dict[tuple[str, str], DomainWriter] = {}
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(documents.corpus, options))
        for batch in _batches(documents.read(bar.update)):
            for (split, document), tokens in zip(batch, encode([item.text for _, item in batch]), strict=True):
                writer = writers.get((split, document.domain))
                if writer is None:
                    writer = DomainWriter(root, split, document.domain, options.shard_tokens)
                    stack.callback(writer.abandon)
                    writers[split, document.domain] = writer
                writer.add(document, tokens)
            _show_speed(bar, sum(writer.tokens for writer in writers.values()))
        ordered = sorted(writers, key=lambda key: (SPLITS.index(key[0]), key[1]))
        return [writers[key].close() for key in ordered]


def _bar(corpus: Corpus, options: PrepareOptions) -> tqdm[Any]:
    """Progress over the bytes of the input: they alone are known beforehand, and give the time left."""
    return tqdm(
        total=corpus.total_bytes,
        desc="tokenising",
        unit="B",
        unit_scale=True,
        disable=not options.progress,
        mininterval=0.5,
    )


def _show_speed(bar: tqdm[Any], tokens: int) -> None:
    seconds = bar.format_dict["elapsed"]
    if seconds:
        bar.set_postfix_str(f"{tqdm.format_sizeof(tokens)} tokens, {tqdm.format_sizeof(tokens / seconds)} tokens/s")


def _batches(documents: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    batch: list[tuple[str, Document]] = []
    characters = 0
    for item in documents:
        batch.append(item)
        characters += len(item[1].text)
        if len(batch) >= BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _check_nothing_missing(plan: SplitPlan, domains: list[DomainEntry]) -> None:
    written = {(entry.split, entry.domain) for entry in domains}
    for option, split, names in (("--train-domains", "train", plan.train), ("--test-domains", "test", plan.test)):
        for name in sorted(names):
            if (split, name) not in written:
                problem = f"{name} has no document in the {split} split"
                raise UserError(option, problem, "choose another domain or give more documents")


def _recorded(options: PrepareOptions) -> dict[str, Any]:
    """Options that decide the content: not where it went, nor how fast."""
    kept = asdict(options)
    for name in ("output", "workers", "progress"):
        del kept[name]
    return kept


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
