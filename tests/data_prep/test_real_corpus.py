"""A real corpus in SlimPajama's layout, prepared with the default options and compared with independent counts.

`SELECTRON_CORPUS` is its folder: train, validation and test, which contain `*.jsonl.zst` at any depth. Tokenizers in
`tokenizers/*/tokenizer.json` and published test sets in `eval` are used if present.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import string
import sys
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
import zstandard
from tokenizers import Tokenizer

from data_prep.manifest import Manifest
from data_prep.prepare import TRAIN_TOKENIZER, PrepareOptions, prepare
from data_prep.running.execution import Execution
from megatron_ext.evaluation.fewshot.published import PUBLISHED_SETS, find_file, read_rows

CORPUS = Path(os.environ.get("SELECTRON_CORPUS", "."))
TRAIN_DOMAINS, TEST_DOMAINS = {"CommonCrawl", "C4"}, {"ArXiv", "Github", "StackExchange", "Wikipedia", "Book"}
PUNCTUATION = {
    code: None
    for code in range(sys.maxunicode + 1)
    if chr(code) in string.punctuation or unicodedata.category(chr(code)).startswith("P")
}
CONTROLS = {code: None for code in range(256) if unicodedata.category(chr(code)) == "Cc" and chr(code) not in "\t\n"}
WORDS = 13

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SELECTRON_CORPUS" not in os.environ, reason="needs SELECTRON_CORPUS, a folder of real text"),
]


@dataclass(frozen=True)
class Given:
    """A record of the corpus, with its text as cleaning should leave it."""

    id: str
    folder: str
    domain: str
    text: str

    @property
    def split(self) -> str | None:
        """Split of the record. None: it is unused."""
        if self.domain in TRAIN_DOMAINS or (self.domain in TEST_DOMAINS and self.folder == "test"):
            return self.folder
        return None

    @property
    def grams(self) -> Iterator[tuple[str, ...]]:
        """All sequences of 13 consecutive words."""
        words = self.text.lower().translate(PUNCTUATION).split()
        return zip(*(words[start:] for start in range(WORDS)), strict=False)


def cleaned(text: str) -> str:
    text = re.sub(r"\r\n|[\r\x0b\x0c]", "\n", text).translate(CONTROLS)
    return unicodedata.normalize("NFC", text)


@pytest.fixture(scope="module")
def given() -> list[Given]:
    """All records, read with only zstandard and json."""
    found = []
    for folder in ("train", "validation", "test"):
        for path in sorted((CORPUS / folder).rglob("*.jsonl.zst")):
            with zstandard.open(path, "rb") as stream:
                for number, line in enumerate(io.BufferedReader(stream), start=1):
                    row = json.loads(line)
                    domain = row["meta"]["redpajama_set_name"].removeprefix("RedPajama")
                    place = f"{path.relative_to(CORPUS).as_posix()}:{number}"
                    found.append(Given(place, folder, domain, cleaned(row["text"])))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real") / "out"


@pytest.fixture(scope="module")
def manifest(root: Path) -> Manifest:
    tokenizer = next(iter(sorted(CORPUS.glob("tokenizers/*/tokenizer.json"))), TRAIN_TOKENIZER)
    prepared_manifest = prepare(
        PrepareOptions(
            input=str(CORPUS),
            output=str(root),
            tokenizer=str(tokenizer),
            shard_tokens=1_000_000,
            execution=Execution(workers=2),
            progress=False,
        )
    )
    assert prepared_manifest is not None
    return prepared_manifest


@pytest.fixture(scope="module")
def remaining(given: list[Given]) -> list[Given]:
    """Records that should remain: one of each set of equal texts, preferably from test, then validation, then train."""
    order = ["test", "validation", "train"]
    first: dict[str, Given] = {}
    for one in sorted((one for one in given if one.split), key=lambda one: order.index(one.folder)):
        if one.text.strip():
            first.setdefault(one.text, one)
    return list(first.values())


def test_all_records_are_counted(given: list[Given], remaining: list[Given], manifest: Manifest) -> None:
    assert len(given) > 1000
    used = Counter(one.split for one in given if one.split)
    written: Counter[str] = Counter()
    for entry in manifest.domains:
        written[entry.split] += entry.documents
    left_out = Counter({split: 0 for split in used})
    for entry in manifest.left_out:
        left_out[entry.split] += entry.documents
    assert not manifest.skipped
    assert {split: written[split] + left_out[split] for split in used} == dict(used)
    assert written == Counter(one.split for one in remaining)
    unused = Counter(one.domain for one in given if not one.split)
    counts: Counter[str] = Counter()
    for entry in manifest.unused:
        counts[entry.domain] += entry.documents
    assert counts == unused
    assert written.total() + left_out.total() + counts.total() == len(given)


def test_splits_of_the_domains(given: list[Given], remaining: list[Given], manifest: Manifest) -> None:
    """A hash decides which of several equal texts in a split remains, so any of their domains may keep it."""
    read = Counter((one.split, one.domain) for one in given if one.split)
    removed = read.total() - len(remaining)
    found = {(entry.split, entry.domain): entry.documents for entry in manifest.domains}
    assert found.keys() == read.keys()
    assert all(read[key] - removed <= found[key] <= read[key] for key in read)
    assert {entry.split for entry in manifest.domains if entry.domain in TEST_DOMAINS} == {"test"}
    assert sum(entry.bytes for entry in manifest.domains) == sum(len(one.text.encode()) for one in remaining)
    assert sum(entry.characters for entry in manifest.domains) == sum(len(one.text) for one in remaining)


def test_tokens_of_each_domain_are_its_text(given: list[Given], root: Path, manifest: Manifest) -> None:
    by_id = {one.id: one for one in given}
    tokenizer = Tokenizer.from_file(str(root / manifest.tokenizer.file))
    for entry in manifest.domains:
        files = [str(root / shard.file) for shard in entry.shards]
        samples = list(webdataset.WebDataset(files, shardshuffle=False).decode())
        assert len(samples) == entry.documents
        sample = random.Random(entry.domain).choice(samples)
        tokens = sample["tokens.npy"].astype(np.int64).tolist()
        one = by_id[sample["json"]["id"]]
        assert (one.split, one.domain) == (entry.split, entry.domain)
        assert tokens.pop() == manifest.tokenizer.eos_id
        assert tokenizer.decode(tokens, skip_special_tokens=False) == one.text


def test_report_equals_an_exhaustive_search(remaining: list[Given], root: Path, manifest: Manifest) -> None:
    own = {one.id: list(one.grams) for one in remaining if one.split == "test"}
    test_grams = {gram for grams in own.values() for gram in grams}
    found: set[tuple[str, ...]] = set()
    train: Counter[str] = Counter()
    for one in remaining:
        if one.split == "train":
            hits = test_grams.intersection(one.grams)
            train.update(documents=1, overlapping=bool(hits))
            found |= hits
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    in_train = {name: sum(gram in found for gram in grams) for name, grams in own.items()}
    for one in remaining:
        if one.split == "test":
            grams, hits = len(own[one.id]), in_train[one.id]
            counts[one.domain].update(documents=1, short=not grams, with_overlap=hits > 0, contaminated=hits > 0)
            counts[one.domain].update(ngrams=grams, ngrams_in_train=hits)
    report: dict[str, Any] = json.loads((root / "contamination.json").read_text())
    assert report["train"] == {name: train[name] for name in ("documents", "overlapping")}
    assert [entry["domain"] for entry in report["domains"]] == sorted(counts)
    for entry in report["domains"]:
        assert {name: entry[name] for name in counts[entry["domain"]]} == counts[entry["domain"]]
        assert entry["dropped"] == 0
    for record in report["worst"]:
        grams = own[record["id"]]
        assert (record["ngrams"], record["ngrams_in_train"]) == (len(grams), in_train[record["id"]])
        assert tuple(record["example"].split()) == next(gram for gram in grams if gram in found)
    assert {record["id"] for record in report["worst"]} <= {name for name, hits in in_train.items() if hits}
    assert bool(report["worst"]) == bool(found)


@pytest.mark.parametrize("task", PUBLISHED_SETS)
def test_published_test_sets(task: str) -> None:
    folder = CORPUS / "eval"
    if not (folder / PUBLISHED_SETS[task].folder).is_dir():
        pytest.skip(f"the corpus has no {task} in its folder eval")
    path = find_file(task, "validation", folder)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = read_rows(task, path)
    assert len(rows) == len(lines) > 100
    answers = {str(row.get("label", row.get("answerKey", row.get("answer")))) for row in rows}
    assert len(answers) > 1
    for row, line in zip(rows, lines, strict=True):
        shared = row.keys() & line.keys() - {"label", "passage"}
        assert shared
        assert {name: row[name] for name in shared} == {name: line[name] for name in shared}
