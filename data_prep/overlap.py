"""datatrove steps that find which n-grams of test documents stand in training documents, and where first.

Every step writes one file a task and can be run again after a kill. The rule and its source are in `decontamination`.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.io import DataFolder, get_datafolder
from datatrove.pipeline.base import PipelineStep

from data_prep.ngrams import Hashes, window_hashes, words_of
from megatron_ext.errors import UserError

TRAIN = "train"
ALL_GRAMS = "all.npy"
FIRST_OWNERS = "first.npy"
OWNERS = "owners.json"
SUMMARY = "summary.json"
PENDING_HASHES = 4_000_000
"""Hashes that are collected before they are sorted and merged (32 MB)."""


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """What overlap is, and what to do about it.

    Attributes:
        ngram_words: words an n-gram.
        splits: splits that are tested against the training split.
        threshold: share of a document's n-grams, 0 to 1; one with more than that in train is contaminated. 0 is the
            rule of the GPT-3 paper: any n-gram.
        action: `report` alone; `drop_test`: contaminated test documents are dropped; `drop_train`: training documents
            are dropped that hold an n-gram of a contaminated test document.
        worst: documents listed a domain.
    """

    ngram_words: int = 13
    splits: tuple[str, ...] = ("test",)
    threshold: float = 0.0
    action: Literal["report", "drop_test", "drop_train"] = "report"
    worst: int = 10

    def __post_init__(self) -> None:
        """Refuse what cannot be.

        Raises:
            UserError: an option is at fault.
        """
        if self.ngram_words < 1:
            raise UserError("--ngram-words", f"{self.ngram_words} is not positive", "give 1 or more")
        if not 0 <= self.threshold < 1:
            raise UserError("--contamination-threshold", f"{self.threshold} is no share", "give 0 or more, below 1")
        if TRAIN in self.splits or not self.splits:
            raise UserError("splits", f"{self.splits} cannot be tested against train", "give test or validation")
        if self.action not in ("report", "drop_test", "drop_train"):
            raise UserError("action", f"{self.action} is unknown", "give report, drop_test or drop_train")


class CollectGrams(PipelineStep):
    """Writes the distinct n-gram hashes of a task's test documents, ascending; passes all documents on."""

    type = "DECONTAMINATION"
    name = "collect n-grams"

    def __init__(self, grams: str, options: OverlapOptions) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.options = options

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Pass documents on; the file is written when they have ended."""
        collected, pending, waiting = np.empty(0, np.uint64), [np.empty(0, np.uint64)], 0
        for document in data:
            yield document
            if document.metadata["split"] not in self.options.splits:
                continue
            with self.track_time():
                pending.append(window_hashes(words_of(document.text), self.options.ngram_words))
                waiting += len(pending[-1])
                if waiting >= PENDING_HASHES:
                    collected, pending, waiting = np.unique(np.concatenate([collected, *pending])), [], 0
            self.stat_update("total")
        save(self.grams, task_name(rank), np.unique(np.concatenate([collected, *pending])))


class MergeGrams(PipelineStep):
    """Merges the n-grams of all tasks into one ascending array. Runs in one task."""

    type = "DECONTAMINATION"
    name = "merge n-grams"

    def __init__(self, grams: str, tasks: int) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Merge."""
        merged = np.empty(0, np.uint64)
        for task in range(self.tasks):
            merged = np.union1d(merged, load(self.grams, task_name(task)))
        save(self.grams, ALL_GRAMS, merged)
        self.stat_update("ngrams", value=len(merged))


class SearchTrain(PipelineStep):
    """Writes which test n-grams the training documents of a task hold, and the first document of the task that does.

    Counts: `total` training documents, and `overlapping`, those that hold any test n-gram.
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
        grams = load(self.grams, ALL_GRAMS)
        seen = np.zeros(len(grams), np.bool_)
        places, owners = array("q"), array("i")
        who: list[list[str]] = []
        counts: Counter[str] = Counter()
        for document in data:
            if document.metadata["split"] != TRAIN:
                continue
            with self.track_time():
                hashes = window_hashes(words_of(document.text), self.options.ngram_words)
                hits = places_in(grams, hashes)
            counts.update(documents=1, overlapping=int(len(hits) > 0))
            new = hits[~seen[hits]]
            if len(new):
                seen[new] = True
                places.extend(new.tolist())
                owners.extend([len(who)] * len(new))
                who.append([document.metadata["source"], document.id])
        self.stat_update("total", value=counts["documents"])
        self.stat_update("overlapping", value=counts["overlapping"])
        rows = np.stack([np.array(places, np.int64), np.array(owners, np.int64)])
        save(self.found, task_name(rank), rows)
        save_json(self.found, f"{rank:05d}.json", {"counts": counts, "owners": who})


class MergeFindings(PipelineStep):
    """Merges what the tasks found: the n-grams found, ascending, and the first training document that holds each.

    First is by source, then by id with its numbers compared as numbers, so that line 9 comes before line 10. Readers
    that read files by name and each in one task give the same for any number of tasks. Runs in one task.
    """

    type = "DECONTAMINATION"
    name = "merge findings"

    def __init__(self, grams: str, found: str, tasks: int) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.found = get_datafolder(found)
        self.tasks = tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Merge."""
        summaries = [load_json(self.found, f"{task:05d}.json") for task in range(self.tasks)]
        owners = sorted({tuple(owner) for summary in summaries for owner in summary["owners"]}, key=_reading_order)
        number = {owner: i for i, owner in enumerate(owners)}
        grams = load(self.grams, ALL_GRAMS)
        first = np.full(len(grams), len(owners), np.int64)
        for task, summary in enumerate(summaries):
            numbers = np.array([number[tuple(owner)] for owner in summary["owners"]], np.int64)
            places, of_task = load(self.found, task_name(task))
            first[places] = np.minimum(first[places], numbers[of_task])  # a place is there once a task
        found = first < len(owners)
        save(self.found, ALL_GRAMS, grams[found])
        save(self.found, FIRST_OWNERS, first[found])
        save_json(self.found, OWNERS, owners)
        counts = sum((Counter(summary["counts"]) for summary in summaries), Counter())
        save_json(self.found, SUMMARY, {name: counts[name] for name in ("documents", "overlapping")})
        self.stat_update("ngrams", value=int(found.sum()))


class JudgeDocuments(PipelineStep):
    """Writes a record for each test document of a task: how much of it stands in train, an example, and where.

    Beside them, it writes the n-grams that contaminated documents share with train.
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
        found, first = load(self.found, ALL_GRAMS), load(self.found, FIRST_OWNERS)
        owners = load_json(self.found, OWNERS)
        banned = [np.empty(0, np.uint64)]
        with self.judged.open(f"{rank:05d}.jsonl", "wt", encoding="utf-8") as file:
            for document in data:
                if document.metadata["split"] not in self.options.splits:
                    continue
                words = words_of(document.text)
                hashes = window_hashes(words, self.options.ngram_words)
                hit = np.isin(hashes, found[places_in(found, hashes)])
                record = self._record(document, words, hit)
                if hit.any():
                    start = int(hit.argmax())
                    source, name = owners[first[np.searchsorted(found, hashes[start])]]
                    example = " ".join(words[start : start + self.options.ngram_words])
                    record |= {"example": example, "train_source": source, "train_id": name}
                if record["contaminated"]:
                    banned.append(hashes[hit])
                file.write(json.dumps(record) + "\n")
                self.stat_update("total", *(["contaminated"] if record["contaminated"] else []))
        save(self.judged, task_name(rank), np.unique(np.concatenate(banned)))

    def _record(self, document: Document, words: list[str], hit: npt.NDArray[np.bool_]) -> dict[str, Any]:
        share = float(hit.mean()) if len(hit) else 0.0
        facts = document.metadata
        return {
            "id": document.id,
            "source": facts["source"],
            "split": facts["split"],
            "domain": facts["domain"],
            "words": len(words),
            "ngrams": len(hit),
            "ngrams_in_train": int(hit.sum()),
            "share": share,
            "longest_overlap_words": _longest_run(hit) + self.options.ngram_words - 1 if hit.any() else 0,
            "contaminated": share > self.options.threshold,
        }


def places_in(ascending: Hashes, hashes: Hashes) -> npt.NDArray[np.int64]:
    """Places in an ascending array of the values that are among `hashes`, ascending, each once."""
    if not len(ascending):
        return np.empty(0, np.int64)
    wanted = np.unique(hashes)  # in order, so that the search walks through memory once
    places = np.searchsorted(ascending, wanted)
    places[places == len(ascending)] = 0
    return places[ascending[places] == wanted]


def _longest_run(hit: npt.NDArray[np.bool_]) -> int:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], hit.astype(np.int8), [0]])))
    return int((edges[1::2] - edges[::2]).max())


def _reading_order(owner: tuple[str, ...]) -> tuple[str, list[str | int]]:
    source, name = owner
    return source, [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def task_name(rank: int) -> str:
    """Name of a task's array."""
    return f"{rank:05d}.npy"


def save(folder: DataFolder, name: str, values: npt.NDArray[Any]) -> None:
    """Write an array."""
    with folder.open(name, "wb") as file:
        np.save(file, values, allow_pickle=False)


def load(folder: DataFolder, name: str) -> npt.NDArray[Any]:
    """Read an array; one on a local disk is mapped, so that processes share its memory."""
    if folder.is_local():
        return np.load(f"{folder.path}/{name}", mmap_mode="r", allow_pickle=False)
    with folder.open(name, "rb") as file:
        return np.load(file, allow_pickle=False)


def save_json(folder: DataFolder, name: str, values: Any) -> None:
    """Write JSON."""
    with folder.open(name, "wt", encoding="utf-8") as file:
        json.dump(values, file)


def load_json(folder: DataFolder, name: str) -> Any:
    """Read JSON."""
    with folder.open(name, "rt", encoding="utf-8") as file:
        return json.load(file)
