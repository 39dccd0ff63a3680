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
from data_prep.ledger import CountLeftOut, Ledger, count_unused
from data_prep.running.progress import Board
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

    def __init__(self, corpus: Corpus, problems: Problems, board: Board | None = None) -> None:
        super().__init__()
        self.corpus = corpus
        self.problems = problems
        self.board = board

    def run(self, data: Iterator[Document] | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Yield the documents of this task."""
        done = [0] if self.board is None else self.board.bytes_of(rank)

        def advance(count: int) -> None:
            done[0] += count

        for unit in range(rank, self.corpus.units, world_size):
            for document in self.corpus.read(unit, self.problems, advance):
                facts = {"domain": document.domain, "source": document.source, "folder": document.folder}
                yield Document(document.text, document.id, metadata=facts | {"changes": document.changes})


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
            facts = document.metadata
            facts["domain"] = self.plan.own_name(facts["domain"])
            side = self.plan.side_of(facts["domain"], facts["folder"])
            if side is None:
                reason = self.plan.why_unused(facts["domain"], facts["folder"])
                count_unused(self.ledger.unused, facts["domain"], reason)
                continue
            facts["split"] = side
            for reason in facts.pop("changes", ()):
                self.ledger.changed[side, reason] += 1
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
            facts = document.metadata
            facts["split"] = self.plan.split_of(document.text, facts["domain"], facts["folder"])
            yield document


def reading(
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
        steps.append(Clean(cleaning, CountLeftOut(ledger, "{}"), ledger))
    return [*steps, AssignSplits(plan)]
