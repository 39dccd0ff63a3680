"""The stages of a preparation, each a datatrove pipeline over the same tasks."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from datatrove.pipeline.base import PipelineStep

from data_prep.documents import Corpus, Problems
from data_prep.exact import DropDuplicates, FindDuplicates, WriteFingerprints, buckets_for
from data_prep.execution import Stage
from data_prep.manifest import TokenizerEntry
from data_prep.merging import Merge
from data_prep.progress import Board
from data_prep.splits import SplitPlan
from data_prep.steps import AssignSplits, ReadCorpus
from data_prep.storage import WORK_NAME
from data_prep.writing import WriteShards


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """What the stages need to know.

    Attributes:
        root: folder that is filled.
        corpus: what is read.
        plan: which split a document belongs to.
        tokenizer: what is in `root`.
        tasks: number of tasks that read documents.
        on_error: at a malformed record.
        shard_tokens: tokens a shard.
        steps: datatrove steps between splitting and tokenising: filters, formatters. Every pass over the documents
            runs them, so they must give the same for the same document.
    """

    root: Path
    corpus: Corpus
    plan: SplitPlan
    tokenizer: TokenizerEntry
    tasks: int
    on_error: Literal["stop", "skip"]
    shard_tokens: int
    steps: list[PipelineStep] = field(default_factory=list)

    def stages(self) -> list[Stage]:
        """Hash every document, find duplicates, tokenise the rest."""
        return [self._hashing(), self._comparing(), self._tokenising()]

    def merge(self, options: dict[str, Any]) -> Merge:
        """What makes one folder of the tasks' shards, with these options in the manifest."""
        provenance = self.corpus.provenance()
        return Merge(self.root, self._folder("shards"), self.tasks, self.plan, self.tokenizer, options, provenance)

    def _hashing(self) -> Stage:
        board = self._board("reading")
        documents = self._documents(Problems(self.on_error), board)
        return Stage("reading", [*documents, WriteFingerprints(self._folder("hashes"))], self.tasks, board)

    def _comparing(self) -> Stage:
        search = FindDuplicates(self._folder("hashes"), self._folder("duplicates"))
        return Stage("comparing", [search], buckets_for(self.corpus.total_bytes))

    def _tokenising(self) -> Stage:
        board, problems = self._board("tokenising"), Problems(self.on_error)
        duplicates = DropDuplicates(self._folder("duplicates"))
        writer = WriteShards(
            self._folder("shards"), self.root, self.tokenizer, self.shard_tokens, problems, duplicates, board
        )
        return Stage("tokenising", [*self._documents(problems, board), duplicates, writer], self.tasks, board)

    def _documents(self, problems: Problems, board: Board) -> list[PipelineStep]:
        return [ReadCorpus(self.corpus, problems, board), AssignSplits(self.plan), *self.steps]

    def _board(self, name: str) -> Board:
        board = Board(self.root / WORK_NAME / f"{name}.progress", self.tasks)
        board.clear_missing()
        return board

    def _folder(self, name: str) -> Path:
        folder = self.root / WORK_NAME / name
        folder.mkdir(exist_ok=True)
        return folder
