"""datatrove steps that find which n-grams of test documents stand in training documents, and where first.

Every step can be run again after a kill. The rule and its source are in `decontamination`.

Memory, for G distinct n-grams of test text: their hashes take 8 G bytes in a file that is mapped, so its pages are
shared by the processes of a machine and can be given back; a worker that searches has G bytes of its own and some
64 MB for what it finds, which it writes in pieces. Steps that merge take a range of hashes at a time, 256 MB, whatever
G is. So the floor is G bytes a worker, 0.2 GB for 200 million n-grams, beside what a process of Python takes.
"""

from __future__ import annotations

import json
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

from data_prep.arrays import appended_array, load, load_json, save, save_json
from data_prep.ngrams import Hashes, window_hashes, words_of
from data_prep.runs import RunWriter, merge_runs, run_names
from data_prep.steps import place_of
from megatron_ext.errors import UserError

TRAIN = "train"
ALL_GRAMS = "all.npy"
FIRST_OWNERS = "first.npy"
SUMMARY = "summary.json"
RUNS = "runs"
FOUND_AT_A_TIME = 2_000_000
"""N-grams found that a task keeps in memory before it writes them (32 MB, and as much to sort them)."""

GRAMS_AT_A_TIME = 8_000_000
"""N-grams whose first documents are compared at a time (96 MB)."""

FOUND = np.dtype([("gram", "<i8"), ("document", "<u8")])
"""Place of an n-gram in the array of all, and the place in the input of the document that holds it."""

OWNER = np.dtype([("document", "<u8"), ("task", "<u4")])
"""Place in the input of the first document that holds an n-gram, and the task that has its name."""

NOT_FOUND = np.uint64(2**64 - 1)


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
            raise UserError("ngram_words", f"{self.ngram_words} is not positive", "give 1 or more")
        if not 0 <= self.threshold < 1:
            raise UserError("threshold", f"{self.threshold} is no share", "give 0 or more, below 1")
        if TRAIN in self.splits or not self.splits:
            raise UserError("splits", f"{self.splits} cannot be tested against train", "give test or validation")
        if self.action not in ("report", "drop_test", "drop_train"):
            raise UserError("action", f"{self.action} is unknown", "give report, drop_test or drop_train")


class CollectGrams(PipelineStep):
    """Writes the distinct n-gram hashes of a task's test documents, as ascending runs."""

    type = "DECONTAMINATION"
    name = "collect n-grams"

    def __init__(self, grams: str, options: OverlapOptions) -> None:
        super().__init__()
        self.grams = get_datafolder(grams)
        self.options = options

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> None:
        """Consume the documents of a task."""
        runs = RunWriter(self.grams, RUNS, rank)
        for document in data:
            if document.metadata["split"] not in self.options.splits:
                continue
            with self.track_time():
                runs.add(window_hashes(words_of(document.text), self.options.ngram_words))
            self.stat_update("total")
        runs.close()


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
        self.stat_update("ngrams", value=merge_runs(self.grams, RUNS, self.tasks, self.grams, ALL_GRAMS))


class SearchTrain(PipelineStep):
    """Writes which test n-grams the training documents of a task hold, and the first document of the task that does.

    Documents say their place in the input, `unit` and `number`, in their metadata. Counts: `total` training documents,
    and `overlapping`, those that hold any test n-gram.
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
        found = _FoundWriter(self.found, rank, len(grams))
        counts: Counter[str] = Counter()
        with self.found.open(names_of(rank), "wt", encoding="utf-8") as names:
            for document in data:
                if document.metadata["split"] != TRAIN:
                    continue
                with self.track_time():
                    hashes = window_hashes(words_of(document.text), self.options.ngram_words)
                    hits = places_in(grams, hashes)
                counts.update(documents=1, overlapping=int(len(hits) > 0))
                if found.add(hits, place_of(document)):
                    owner = [place_of(document), document.metadata["source"], document.id]
                    names.write(json.dumps(owner) + "\n")
        found.close()
        self.stat_update("total", value=counts["documents"])
        self.stat_update("overlapping", value=counts["overlapping"])
        save_json(self.found, f"{rank:05d}.json", counts)


class _FoundWriter:
    """Writes the n-grams that a task finds, each with the first document that holds it, as runs ascending by n-gram."""

    def __init__(self, folder: DataFolder, rank: int, grams: int) -> None:
        self._folder = folder
        self._prefix = f"{RUNS}/{rank:05d}"
        self._runs = 0
        self._seen = np.zeros(grams, np.bool_)
        self._grams, self._documents = array("q"), array("Q")

    def add(self, hits: npt.NDArray[np.int64], document: int) -> bool:
        """Take the n-grams of a document; whether it is the first of the task with any of them."""
        new = hits[~self._seen[hits]]
        self._seen[new] = True
        self._grams.frombytes(new.tobytes())
        self._documents.extend([document] * len(new))
        if len(self._grams) >= FOUND_AT_A_TIME:
            self.close()
        return len(new) > 0

    def close(self) -> None:
        """Write what is left, if only to say that the task has nothing."""
        rows = np.empty(len(self._grams), FOUND)
        rows["gram"], rows["document"] = self._grams, self._documents
        save(self._folder, f"{self._prefix}-{self._runs:05d}.npy", rows[np.argsort(rows["gram"])])
        self._grams, self._documents, self._runs = array("q"), array("Q"), self._runs + 1


class MergeFindings(PipelineStep):
    """Merges what the tasks found: the n-grams found, ascending, and the first training document that holds each.

    First is by place in the input, so that any number of tasks gives the same. Runs in one task.
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
        grams = load(self.grams, ALL_GRAMS)
        runs = run_names(self.found, RUNS, self.tasks)
        with (
            appended_array(self.found, ALL_GRAMS, np.uint64) as add_grams,
            appended_array(self.found, FIRST_OWNERS, OWNER) as add_owners,
        ):
            for start in range(0, len(grams), GRAMS_AT_A_TIME):
                part = grams[start : start + GRAMS_AT_A_TIME]
                owners = self._first_owners(runs, start, len(part))
                found = owners["document"] != NOT_FOUND
                add_grams(part[found])
                add_owners(owners[found])
                self.stat_update("ngrams", value=int(found.sum()))
        summaries = (load_json(self.found, f"{task:05d}.json") for task in range(self.tasks))
        counts = sum((Counter(summary) for summary in summaries), Counter())
        save_json(self.found, SUMMARY, {name: counts[name] for name in ("documents", "overlapping")})

    def _first_owners(self, runs: list[list[str]], start: int, number: int) -> npt.NDArray[np.void]:
        """First documents of so many n-grams, shape (number,)."""
        first = np.zeros(number, OWNER)
        first["document"] = NOT_FOUND
        for task, of_task in enumerate(runs):
            for run in of_task:
                rows = load(self.found, run)
                low, high = np.searchsorted(rows["gram"], [start, start + number])
                places, documents = rows["gram"][low:high] - start, rows["document"][low:high]
                earlier = documents < first["document"][places]  # a place is there once a task
                first["document"][places[earlier]] = documents[earlier]
                first["task"][places[earlier]] = task
        return first


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
        banned = RunWriter(self.judged, RUNS, rank)
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
                    owner = first[np.searchsorted(found, hashes[start])]
                    record["example"] = " ".join(words[start : start + self.options.ngram_words])
                    record["train_document"] = [int(owner["task"]), int(owner["document"])]
                if record["contaminated"]:
                    banned.add(hashes[hit])
                file.write(json.dumps(record) + "\n")
                self.stat_update("total", *(["contaminated"] if record["contaminated"] else []))
        banned.close()

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


def names_of(rank: int) -> str:
    """Name of the file in which a task that searches writes place, source and id of documents, one a line."""
    return f"{rank:05d}.jsonl"
