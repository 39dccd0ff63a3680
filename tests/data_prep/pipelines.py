"""Documents for pipeline steps, and functions that run stages."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from data_prep.running.execution import QuietExecutor, Stage


def document(text: str, name: str, split: str = "train", domain: str = "C4") -> Document:
    return Document(text, name, metadata={"domain": domain, "source": name.split(":")[0], "split": split})


class Given(PipelineStep):
    """Reader of given documents. Task r of w reads every w-th document, from document r."""

    type = "READER"
    name = "given"

    def __init__(self, documents: Sequence[Document]) -> None:
        super().__init__()
        self.documents = list(documents)

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for given in self.documents[rank::world_size]:
            yield Document(given.text, given.id, metadata=dict(given.metadata))


class FailsOnce(PipelineStep):
    """Step that fails in the middle of task 1 when it first runs."""

    type = "READER"
    name = "fails once"

    def __init__(self, mark: Path) -> None:
        super().__init__()
        self.mark = mark

    def run(self, data: Iterator[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for number, given in enumerate(data):
            if rank == 1 and number == 5 and not self.mark.exists():
                self.mark.touch()
                raise RuntimeError("power cut")
            yield given


def run(stages: Sequence[Stage], logs: Path, workers: int = 1) -> None:
    """Run stages in sequence with the executor of `selectron prepare`."""
    for stage in stages:
        QuietExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs / stage.name)).run()


def run_here(stages: Sequence[Stage]) -> dict[str, dict[str, float]]:
    """Run stages without an executor. Return the counts of each stage's last step, summed over all tasks."""
    found = {}
    for stage in stages:
        counts: Counter[str] = Counter()
        for rank in range(stage.tasks):
            data, steps = None, deepcopy(stage.steps)
            for step in steps:
                data = step.run(data, rank, stage.tasks)
            deque(data or (), maxlen=0)
            counts.update({name: metric.total for name, metric in steps[-1].stats.stats.items()})
        found[stage.name] = dict(counts)
    return found


def read(steps: Sequence[PipelineStep], tasks: int) -> list[Document]:
    """Return the output of a pipeline, task by task."""
    found = []
    for rank in range(tasks):
        data = None
        for step in steps:
            data = step.run(data, rank, tasks)
        found += list(data)
    return found
