"""datatrove steps that find the n-grams of test documents in training documents, and their first occurrence.

Every step can be rerun after a kill. The module `decontamination` describes the rule and its source.

Memory: the hashes of n distinct n-grams of test text take 8 n bytes in a memory-mapped file. The pages of this file are
shared by the processes of a machine and can be reclaimed. A search worker needs another 128 MB for its findings, which
it writes in pieces. Merge steps process a range of hashes at a time, in 256 MB. Apart from the mapped file, memory does
not grow with n.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.io import get_datafolder
from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.arrays import load_array, save_json
from data_prep.contamination.findings import ALL_GRAMS, FIRST_OWNERS, FindingsWriter, names_file
from data_prep.contamination.ngrams import Hashes, split_words, window_hashes
from data_prep.contamination.runs import RUNS, RunWriter, merge_runs
from megatron_ext.utils.errors import UserError

TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """Options of overlap detection and of the action.

    Attributes:
        ngram_words: words per n-gram.
        splits: splits whose documents are compared with the training split.
        threshold: a document is contaminated if more than this fraction of its n-grams, 0 to 1, occurs in train. With
            0, as in the GPT-3 paper, a single n-gram suffices.
        action: `report` only; `drop_test` drops contaminated test documents; `drop_train` drops training documents that
            contain an n-gram of a contaminated test document.
        worst: number of most contaminated documents that the report lists per domain.
    """

    ngram_words: int = 13
    splits: tuple[str, ...] = ("test",)
    threshold: float = 0.0
    action: Literal["report", "drop_test", "drop_train"] = "report"
    worst: int = 10

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            UserError: an option is invalid.
        """
        if self.ngram_words < 1:
            raise UserError("--ngram-words", f"{self.ngram_words} is not positive", "give 1 or more")
        if not 0 <= self.threshold < 1:
            raise UserError(
                "--contamination-threshold", f"{self.threshold} is not in [0, 1)", "give 0 or more, below 1"
            )
        if TRAIN in self.splits or not self.splits:
            raise UserError("splits", f"{self.splits} cannot be tested against train", "give test or validation")
        if self.action not in ("report", "drop_test", "drop_train"):
            raise UserError("action", f"{self.action} is unknown", "give report, drop_test or drop_train")


class CollectGrams(PipelineStep):
    """Step that writes the n-gram hashes of a task's test documents as sorted runs, and yields all documents."""

    type = "DECONTAMINATION"
    name = "collect n-grams"

    def __init__(self, grams: str, options: OverlapOptions) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.options = options

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents; the last run is written at the end."""
        runs = RunWriter(self.grams, RUNS, rank)
        for document in data:
            yield document
            if document.metadata["split"] not in self.options.splits:
                continue
            with self.track_time():
                runs.add(window_hashes(split_words(document.text), self.options.ngram_words))
            self.stat_update("total")
        runs.close()


class MergeGrams(PipelineStep):
    """Step that merges the n-grams of all tasks into one ascending array. It runs in one task."""

    type = "DECONTAMINATION"
    name = "merge n-grams"

    def __init__(self, grams: str, tasks: int) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Merge the n-grams of all tasks."""
        self.stat_update("ngrams", value=merge_runs(self.grams, RUNS, self.tasks, self.grams, ALL_GRAMS))


class SearchTrain(PipelineStep):
    """Step that writes the test n-grams in a task's training documents, and the first document that contains each.

    The step's statistics are `total`, the number of training documents, and `overlapping`, the number of training
    documents with any test n-gram.
    """

    type = "DECONTAMINATION"
    name = "search train"

    def __init__(self, grams: str, found: str, options: OverlapOptions) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.found = get_datafolder(found)
        self.options = options

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        """Consume the documents of a task."""
        grams = load_array(self.grams, ALL_GRAMS)
        found = FindingsWriter(self.found, rank, len(grams))
        counts: Counter[str] = Counter()
        sources: dict[str, int] = {}
        num_read: Counter[str] = Counter()
        with self.found.open(names_file(rank), "wt", encoding="utf-8") as names:
            for document in data:
                if document.metadata["split"] != TRAIN:
                    continue
                with self.track_time():
                    hashes = window_hashes(split_words(document.text), self.options.ngram_words)
                    hits = find_indices(grams, hashes)
                counts.update(documents=1, overlapping=int(len(hits) > 0))
                source = document.metadata["source"]
                document_code = (sources.setdefault(source, len(sources)) << 32) + num_read[source]
                num_read[source] += 1
                if found.add(hits, document_code):
                    names.write(json.dumps([document_code, source, document.id]) + "\n")
        found.close()
        self.stat_update("total", value=counts["documents"])
        self.stat_update("overlapping", value=counts["overlapping"])
        save_json(self.found, f"{rank:05d}.json", {"counts": counts, "sources": list(sources)})


class JudgeDocuments(PipelineStep):
    """Step that writes a record of each test document, and the n-grams that contaminated documents share with train.

    A record contains the fraction of the document's n-grams that occur in train, and an example of such an n-gram with
    the training document that contains it.
    """

    type = "DECONTAMINATION"
    name = "judge documents"

    def __init__(self, found: str, judged: str, options: OverlapOptions) -> None:
        super().__init__()
        self.found = get_datafolder(found)
        self.judged = get_datafolder(judged)
        self.options = options

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        """Consume the documents of a task."""
        found, first = load_array(self.found, ALL_GRAMS), load_array(self.found, FIRST_OWNERS)
        banned = RunWriter(self.judged, RUNS, rank)
        with self.judged.open(judgements_file(rank), "wt", encoding="utf-8") as file:
            for document in data:
                if document.metadata["split"] not in self.options.splits:
                    continue
                words = split_words(document.text)
                hashes = window_hashes(words, self.options.ngram_words)
                is_hit = np.isin(hashes, found[find_indices(found, hashes)])
                record = self._record(document, words, is_hit)
                if is_hit.any():
                    start = int(is_hit.argmax())
                    owner = first[np.searchsorted(found, hashes[start])]
                    record["example"] = " ".join(words[start : start + self.options.ngram_words])
                    record["train_document"] = [int(owner["task"]), int(owner["document"])]
                if record["contaminated"]:
                    banned.add(hashes[is_hit])
                file.write(json.dumps(record) + "\n")
                self.stat_update("total", *(["contaminated"] if record["contaminated"] else []))
        banned.close()

    def _record(self, document: Document, words: list[str], is_hit: npt.NDArray[np.bool_]) -> dict[str, Any]:
        share = float(is_hit.mean()) if len(is_hit) else 0.0
        metadata = document.metadata
        return {
            "id": document.id,
            "source": metadata["source"],
            "split": metadata["split"],
            "domain": metadata["domain"],
            "words": len(words),
            "ngrams": len(is_hit),
            "ngrams_in_train": int(is_hit.sum()),
            "share": share,
            "longest_overlap_words": _longest_run(is_hit) + self.options.ngram_words - 1 if is_hit.any() else 0,
            "contaminated": share > self.options.threshold,
        }


def judgements_file(rank: int) -> str:
    """Return the name of a `JudgeDocuments` task's file, with one JSON record per test document."""
    return f"{rank:05d}.jsonl"


def find_indices(ascending: Hashes, hashes: Hashes) -> npt.NDArray[np.int64]:
    """Return the sorted indices in an ascending array of the distinct values that occur in `hashes`."""
    if not len(ascending):
        return np.empty(0, np.int64)
    values = np.unique(hashes)  # sorted, for sequential memory access
    indices = np.searchsorted(ascending, values)
    indices[indices == len(ascending)] = 0
    return indices[ascending[indices] == values]


def _longest_run(is_hit: npt.NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], is_hit.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max())
