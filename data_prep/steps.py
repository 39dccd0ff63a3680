"""datatrove steps that every stage begins with: documents of the corpus, each with its split.

A document's `metadata` says: `domain`, `source`, `folder` (the split whose folder it lies in, or None), `split`, and
its place in the input, `unit` (file) and `number` (document of that file, from 0).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_prep.documents import Corpus, Problems
from data_prep.progress import Board
from data_prep.splits import SplitPlan


class ReadCorpus(PipelineStep):
    """Reads the files of a task: of w tasks, task r reads files r, r + w, r + 2 w, ...

    Args:
        corpus: what is read.
        problems: what to do about malformed records. Each task counts its own, in its own copy.
        board: told the bytes read.
    """

    type = "READER"
    name = "corpus"

    def __init__(self, corpus: Corpus, problems: Problems, board: Board) -> None:
        super().__init__()
        self.corpus = corpus
        self.problems = problems
        self.board = board

    def run(self, data: Iterator[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of this task."""
        done = self.board.bytes_of(rank)

        def advance(count: int) -> None:
            done[0] += count

        for unit in range(rank, self.corpus.units, world_size):
            for number, document in enumerate(self.corpus.read(unit, self.problems, advance)):
                place = {"folder": document.folder, "unit": unit, "number": number}
                metadata = {"domain": document.domain, "source": document.source, **place}
                yield Document(document.text, document.id, metadata=metadata)


class AssignSplits(PipelineStep):
    """Adds `split` to documents, and drops those that no split takes."""

    type = "SPLITTER"
    name = "splits"

    def __init__(self, plan: SplitPlan) -> None:
        super().__init__()
        self.plan = plan

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are used."""
        for document in data:
            facts = document.metadata
            split = self.plan.split_of(document.text, facts["domain"], facts["folder"])
            if split is not None:
                facts["split"] = split
                yield document


def place_of(document: Document) -> int:
    """Where a document stands in the input, as one number that grows with it: file * 2**32 + document."""
    return int(np.uint64(document.metadata["unit"]) << np.uint64(32)) + int(document.metadata["number"])
