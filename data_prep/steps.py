"""datatrove steps that every stage begins with: documents of the corpus, each with its split.

A document's `metadata` says: `domain`, `source`, `folder` (the split whose folder it lies in, or None) and `split`;
until the last is known, also `changes`, which are then counted.
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
    """Reads the files of a task: of w tasks, task r reads files r, r + w, r + 2 w, ...

    Args:
        corpus: what is read.
        problems: what to do about malformed records. Each task counts its own, in its own copy.
        board: told the bytes read; None: nobody is.
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
    """Drops documents that no split takes; of the others, `split` is the side that they are on.

    Spellings of one domain become one.

    Args:
        plan: which split a document belongs to.
        ledger: told of those that are dropped.
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
    """Sets `split` of documents by their cleaned text."""

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
    """The steps that every pass over the documents begins with: read, choose domains, clean, split.

    Args:
        corpus: what is read.
        plan: which split a document belongs to.
        cleaning: what is cleaned; None: nothing.
        problems: what to do about malformed records.
        ledger: told of documents that are not used, and of those that cleaning changes or leaves out.
    """
    steps: list[PipelineStep] = [ReadCorpus(corpus, problems), ChooseDomains(plan, ledger)]
    if cleaning is not None:
        steps.append(Clean(cleaning, CountLeftOut(ledger, "{}"), ledger))
    return [*steps, AssignSplits(plan)]
