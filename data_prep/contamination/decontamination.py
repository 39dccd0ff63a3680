"""How much of the test text stands in the training text: 13-grams and a report, as stages for datatrove's executors.

Brown et al. 2020 (arXiv 2005.14165, appendix C) call an example contaminated that has a 13-gram in common with the
training text; `ngrams` says what a word is. Here, the hashes of all test 13-grams are collected, every training
document is searched for them, and every test document is judged by the share of its 13-grams that were found, each
place counted. A document of fewer words than an n-gram cannot be judged so, and is reported as short. One 13-gram says
little about a test document as long as an article, so what is too much is an option: `threshold`.

Memory is said in `overlap`: it does not grow with the text, but for pages of a file that is mapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from datatrove.pipeline.base import PipelineStep

from data_prep.contamination.findings import MergeFindings
from data_prep.contamination.overlap import CollectGrams, JudgeDocuments, MergeGrams, OverlapOptions, SearchTrain
from data_prep.contamination.overlap_filter import DropContaminated
from data_prep.contamination.report import WriteReport
from data_prep.ledger import CountLeftOut, Ledger
from data_prep.running.execution import Stage


@dataclass(frozen=True)
class Source:
    """Steps that read documents, and how many tasks they are read in.

    Attributes:
        steps: they give the same documents every time, with `split` and `domain` in their metadata.
        tasks: number of tasks.
    """

    steps: list[PipelineStep]
    tasks: int


@dataclass(frozen=True)
class Decontamination:
    """Stages that look for test text in training text, and what acts on it.

    Attributes:
        stages: to run one after the other; the last one leaves `report.json` and `report.md` in the folder.
        drop: step to put behind whatever reads documents afterwards: drops what the action says, and counts it. Where
            that is test documents, it reads the documents of `test` in as many tasks, and refuses others.
    """

    stages: list[Stage]
    drop: DropContaminated


def collecting(folder: str, options: OverlapOptions) -> CollectGrams:
    """The step that collects test n-grams, for a pass that is made anyway: it passes all documents on.

    That pass may read documents which `decontamination` no longer does, such as copies: what only they hold is looked
    for in vain, and changes nothing in the report.
    """
    return CollectGrams(f"{folder}/grams", options)


def decontamination(
    test: Source,
    train: Source,
    folder: str,
    options: OverlapOptions | None = None,
    *,
    collected: bool = False,
    ledger: Ledger | None = None,
) -> Decontamination:
    """Look for test text in training text.

    Args:
        test: reads the documents of the tested splits; others among them are passed over.
        train: reads the training documents; others among them are passed over. May be the same as `test`.
        folder: for results, local or an fsspec URL.
        options: what overlap is, and what to do about it.
        collected: whether another pass, in as many tasks as `test`, has run the step of `collecting`.
        ledger: told of the documents that are left out.
    """
    options = options or OverlapOptions()
    grams, found, judged = (f"{folder}/{part}" for part in ("grams", "found", "judged"))
    stages = [
        *([] if collected else [Stage("collect_test_ngrams", [*test.steps, collecting(folder, options)], test.tasks)]),
        Stage("merge_test_ngrams", [MergeGrams(grams, test.tasks)], 1),
        Stage("search_train", [*train.steps, SearchTrain(grams, found, options)], train.tasks),
        Stage("merge_findings", [MergeFindings(grams, found, train.tasks)], 1),
        Stage("judge_test", [*test.steps, JudgeDocuments(found, judged, options)], test.tasks),
        Stage("report", [WriteReport(judged, found, folder, test.tasks, options)], 1),
    ]
    counting = CountLeftOut(ledger or Ledger(), "contaminated")
    return Decontamination(stages, DropContaminated(folder, judged, options, counting))
