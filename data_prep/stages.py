"""Stages of a preparation, each a datatrove pipeline over the same tasks.

The stages select domains, clean, split by hash, remove duplicates, search for test text in training text, and tokenise.
Every pass over the documents begins with the same steps. Only tokens are written, never text. Without deduplication and
decontamination there is a single pass. With exact deduplication and a contamination report there are four passes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from datatrove.pipeline.base import PipelineStep

from data_prep.cleaning import CleaningOptions
from data_prep.contamination.decontamination import DocumentSource, build_decontamination, collect_grams_step
from data_prep.contamination.overlap import OverlapOptions
from data_prep.deduplication.duplicates import NearOptions, exact_duplicates, near_duplicates
from data_prep.documents import Corpus, Problems
from data_prep.ledger import Ledger
from data_prep.manifest import TokenizerEntry
from data_prep.output.merging import Merge
from data_prep.output.writing import WriteShards
from data_prep.running.execution import Stage
from data_prep.running.progress import ProgressBoard
from data_prep.splits import SplitPlan
from data_prep.steps import ReadCorpus, reading_steps
from data_prep.storage import WORK_NAME


@dataclass(frozen=True, kw_only=True)
class Filtering:
    """Processing of documents before tokenisation.

    Attributes:
        cleaning: options of the cleaning; None for no cleaning.
        duplicates: `keep` all duplicates, remove `exact` duplicates, or remove exact and `near` duplicates.
        near: options of near-duplicate detection.
        overlap: options of the search for test text in training text; None for no search.
    """

    cleaning: CleaningOptions | None = field(default_factory=CleaningOptions)
    duplicates: Literal["keep", "exact", "near"] = "exact"
    near: NearOptions = field(default_factory=NearOptions)
    overlap: OverlapOptions | None = field(default_factory=OverlapOptions)

    def as_options(self) -> dict[str, Any]:
        """Return the options by the names of the command-line options, with `_` for `-`."""
        cleaning, overlap = self.cleaning or CleaningOptions(), self.overlap or OverlapOptions()
        return {
            "clean": self.cleaning is not None,
            "nul": cleaning.nul,
            "duplicates": self.duplicates,
            **{f"near_{name}": value for name, value in asdict(self.near).items()},
            "decontaminate": "off" if self.overlap is None else overlap.action.replace("_", "-"),
            "contamination_threshold": overlap.threshold,
            "ngram_words": overlap.ngram_words,
        }


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Inputs of the stages.

    Attributes:
        root: folder being filled.
        corpus: corpus to read.
        plan: assignment of documents to splits.
        filtering: processing of documents before tokenisation.
        tokenizer: entry of the tokenizer in `root`.
        tasks: number of tasks that read documents.
        on_error: handling of malformed records.
        shard_tokens: tokens per shard.
    """

    root: Path
    corpus: Corpus
    plan: SplitPlan
    filtering: Filtering
    tokenizer: TokenizerEntry
    tasks: int
    on_error: Literal["stop", "skip"]
    shard_tokens: int

    def stages(self) -> list[Stage]:
        """Return all stages in order."""
        problems, ledger = Problems(self.on_error), Ledger()
        documents = reading_steps(self.corpus, self.plan, self.filtering.cleaning, problems, ledger)
        stages, documents = self._deduplication_stages(documents, ledger)
        contamination_stages, documents = self._decontamination_stages(documents, ledger)
        filter_stages = [self._with_progress(stage) for stage in (*stages, *contamination_stages)]
        return [*filter_stages, self._tokenisation_stage(documents, problems, ledger)]

    def merge(self, options: dict[str, Any]) -> Merge:
        """Return the merge of the tasks' shards into one folder.

        Args:
            options: options of the preparation, for the manifest.
        """
        report = self._folder("contamination") if self._overlap else None
        return Merge(
            root=self.root,
            tasks_folder=self._folder("shards"),
            tasks=self.tasks,
            plan=self.plan,
            tokenizer=self.tokenizer,
            report=report,
            options=options,
            provenance=self.corpus.provenance(),
        )

    @property
    def _overlap(self) -> OverlapOptions | None:
        return self.filtering.overlap if self.plan.has_test else None

    def _deduplication_stages(
        self, documents: list[PipelineStep], ledger: Ledger
    ) -> tuple[list[Stage], list[PipelineStep]]:
        """Return the stages that find duplicates, and the steps that read the documents without duplicates."""
        if self.filtering.duplicates == "keep":
            return [], documents
        extra = [collect_grams_step(str(self._folder("contamination")), self._overlap)] if self._overlap else []
        exact = exact_duplicates(documents, str(self._folder("exact")), self.tasks, extra_steps=extra, ledger=ledger)
        if self.filtering.duplicates == "exact":
            return exact.stages, exact.documents
        near = near_duplicates(exact.documents, str(self._folder("near")), self.tasks, self.filtering.near, ledger)
        return [*exact.stages, *near.stages], near.documents

    def _decontamination_stages(
        self, documents: list[PipelineStep], ledger: Ledger
    ) -> tuple[list[Stage], list[PipelineStep]]:
        """Return the stages that search for test text, and the steps that read the remaining documents."""
        if self._overlap is None:
            return [], documents
        source, folder = DocumentSource(documents, self.tasks), str(self._folder("contamination"))
        collected = self.filtering.duplicates != "keep"
        built = build_decontamination(source, source, folder, self._overlap, collected=collected, ledger=ledger)
        return built.stages, [*documents, built.drop] if self._overlap.action != "report" else documents

    def _tokenisation_stage(self, documents: list[PipelineStep], problems: Problems, ledger: Ledger) -> Stage:
        stage = self._with_progress(Stage("tokenising", documents, self.tasks))
        assert stage.board is not None
        writer = WriteShards(
            self._folder("shards"), self.root, self.tokenizer, self.shard_tokens, problems, ledger, stage.board
        )
        return replace(stage, steps=[*stage.steps, writer])

    def _with_progress(self, stage: Stage) -> Stage:
        """Return a stage with its own progress board if it reads the corpus, and any other stage unchanged."""
        reader, *remaining_steps = stage.steps
        if not isinstance(reader, ReadCorpus):
            return stage
        board = ProgressBoard(self.root / WORK_NAME / f"{stage.name}.progress", stage.tasks)
        board.create()
        return replace(stage, steps=[ReadCorpus(self.corpus, reader.problems, board), *remaining_steps], board=board)

    def _folder(self, name: str) -> Path:
        folder = self.root / WORK_NAME / name
        folder.mkdir(exist_ok=True)
        return folder
