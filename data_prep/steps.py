"""datatrove steps at the start of every stage: documents of the corpus, each with its split.

A document's `metadata` contains `domain`, `source`, `folder` (the split whose folder contains it, or None) and `split`.
Before `split` is set, it also contains `changes`, which are then counted.
"""

from __future__ import annotations

from collections.abc import Iterator

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_prep.cleaning import Clean, CleaningOptions
from data_prep.documents import Corpus, Problems
from data_prep.ledger import DropCounter, Ledger, count_unused
from data_prep.running.progress import ProgressBoard
from data_prep.splits import SplitPlan


class ReadCorpus(PipelineStep):
    """Step that reads the files of a task. Task r of w reads the files with the indices r, r + w, r + 2 w, ...

    Args:
        corpus: corpus to read.
        problems: handling of malformed records. Each task has its own copy with its own counts.
        board: progress board that receives the bytes read; None: no board.
    """

    type = "READER"
    name = "corpus"

    def __init__(self, corpus: Corpus, problems: Problems, board: ProgressBoard | None = None) -> None:
        super().__init__()
        self.corpus = corpus
        self.problems = problems
        self.board = board

    def run(self, data: Iterator[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of this task."""
        bytes_read = [0] if self.board is None else self.board.byte_counter(rank)

        def advance(count: int) -> None:
            bytes_read[0] += count

        for unit in range(rank, self.corpus.units, world_size):
            for document in self.corpus.read(unit, self.problems, advance):
                metadata = {"domain": document.domain, "source": document.source, "folder": document.folder}
                yield Document(document.text, document.id, metadata=metadata | {"changes": document.changes})


class ChooseDomains(PipelineStep):
    """Step that drops documents that no split uses, and sets `split` of all others without reading their text.

    The step also unifies the spellings of a domain. `AssignSplits` later replaces `split` where it depends on the text.

    Args:
        plan: assignment of documents to splits.
        ledger: receives the counts of dropped documents.
    """

    type = "SPLITTER"
    name = "domains"

    def __init__(self, plan: SplitPlan, ledger: Ledger) -> None:
        super().__init__()
        self.plan = plan
        self.ledger = ledger

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents that are used."""
        for document in data:
            metadata = document.metadata
            metadata["domain"] = self.plan.canonical_name(metadata["domain"])
            split = self.plan.split_without_text(metadata["domain"], metadata["folder"])
            if split is None:
                reason = self.plan.unused_reason(metadata["domain"], metadata["folder"])
                count_unused(self.ledger.unused, metadata["domain"], reason)
                continue
            metadata["split"] = split
            for reason in metadata.pop("changes", ()):
                self.ledger.changed[split, reason] += 1
            yield document


class AssignSplits(PipelineStep):
    """Step that sets `split` of documents by their cleaned text."""

    type = "SPLITTER"
    name = "splits"

    def __init__(self, plan: SplitPlan) -> None:
        super().__init__()
        self.plan = plan

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield all documents."""
        for document in data:
            metadata = document.metadata
            metadata["split"] = self.plan.assign_split(document.text, metadata["domain"], metadata["folder"])
            yield document


def reading_steps(
    corpus: Corpus, plan: SplitPlan, cleaning: CleaningOptions | None, problems: Problems, ledger: Ledger
) -> list[PipelineStep]:
    """Return the first steps of every pass over the documents: read, select domains, clean, split.

    Args:
        corpus: corpus to read.
        plan: assignment of documents to splits.
        cleaning: options of the cleaning; None for no cleaning.
        problems: handling of malformed records.
        ledger: receives the counts of unused documents, and of documents that cleaning changes or drops.
    """
    steps: list[PipelineStep] = [ReadCorpus(corpus, problems), ChooseDomains(plan, ledger)]
    if cleaning is not None:
        steps.append(Clean(cleaning, DropCounter(ledger, "{}"), ledger))
    return [*steps, AssignSplits(plan)]
