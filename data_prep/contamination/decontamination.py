"""Contamination of training text by test text: 13-grams and a report, as stages for datatrove's executors.

Brown et al. 2020 (arXiv 2005.14165, appendix C) call an example contaminated if it shares a 13-gram with the training
text. `ngrams` defines a word. Here, the hashes of all test 13-grams are collected and searched in every training
document. Every test document is then judged by the share of its 13-grams that were found, repetitions included.
A document with fewer words than an n-gram cannot be judged and is reported as short. In a test document as long as an
article, one 13-gram is weak evidence, so the limit is an option, `threshold`.

`overlap` describes the memory use: it does not grow with the text, except for pages of a memory-mapped file.
"""

from __future__ import annotations

from dataclasses import dataclass

from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.findings import MergeFindings
from data_prep.contamination.overlap import CollectGrams, JudgeDocuments, MergeGrams, OverlapOptions, SearchTrain
from data_prep.contamination.overlap_filter import DropContaminated
from data_prep.contamination.report import WriteReport
from data_prep.ledger import DropCounter, Ledger
from data_prep.running.execution import Stage


@dataclass(frozen=True)
class DocumentSource:
    """Steps that read documents, and the number of tasks.

    Attributes:
        steps: datatrove steps. They must yield the same documents every time, with `split` and `domain` in the
            metadata.
        tasks: number of tasks.
    """

    steps: list[PipelineStep]
    tasks: int


@dataclass(frozen=True)
class Decontamination:
    """Stages that search for test text in training text, and the step that acts on the result.

    Attributes:
        stages: stages to run in order; the last one writes `report.json` and `report.md` to the folder.
        drop: step to append to later readers of the documents. It drops and counts the documents that the action
            requires. If the action drops test documents, the step must receive the documents of `test` in as many
            tasks, and raises otherwise.
    """

    stages: list[Stage]
    drop: DropContaminated


def collect_grams_step(folder: str, options: OverlapOptions) -> CollectGrams:
    """Return the step that collects test n-grams, to be added to an existing pass. It yields all documents unchanged.

    That pass may read documents which `build_decontamination` no longer reads, such as duplicates. Their additional
    n-grams do not change the report.
    """
    return CollectGrams(f"{folder}/grams", options)


def build_decontamination(
    test: DocumentSource,
    train: DocumentSource,
    folder: str,
    options: OverlapOptions | None = None,
    *,
    collected: bool = False,
    ledger: Ledger | None = None,
) -> Decontamination:
    """Build the stages that search for test text in training text.

    Args:
        test: reads the documents of the tested splits; other documents are skipped.
        train: reads the training documents; other documents are skipped. May be equal to `test`.
        folder: folder for results, local or an fsspec URL.
        options: options of overlap and action.
        collected: True if another pass, in as many tasks as `test`, has run the step of `collect_grams_step`.
        ledger: receives the numbers of dropped documents.
    """
    options = options or OverlapOptions()
    grams, found, judged = (f"{folder}/{part}" for part in ("grams", "found", "judged"))
    collect = Stage("collect_test_ngrams", [*test.steps, collect_grams_step(folder, options)], test.tasks)
    stages = [
        *([] if collected else [collect]),
        Stage("merge_test_ngrams", [MergeGrams(grams, test.tasks)], 1),
        Stage("search_train", [*train.steps, SearchTrain(grams, found, options)], train.tasks),
        Stage("merge_findings", [MergeFindings(grams, found, train.tasks)], 1),
        Stage("judge_test", [*test.steps, JudgeDocuments(found, judged, options)], test.tasks),
        Stage("report", [WriteReport(judged, found, folder, test.tasks, options)], 1),
    ]
    counter = DropCounter(ledger or Ledger(), "contaminated")
    return Decontamination(stages, DropContaminated(folder, judged, options, counter))
