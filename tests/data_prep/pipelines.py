"""Documents for pipeline steps, and a way to run stages with datatrove's local executor."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep

from data_prep.stages import Stage


def document(text: str, name: str, split: str = "train", domain: str = "C4") -> Document:
    return Document(text, name, metadata={"domain": domain, "source": name.split(":")[0], "split": split})


class Given(PipelineStep):
    """A reader of documents that are there already: task r of w gets every w-th."""

    type = "READER"
    name = "given"

    def __init__(self, documents: Sequence[Document]) -> None:
        super().__init__()
        self.documents = list(documents)

    def run(self, data: object = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        for given in self.documents[rank::world_size]:
            yield Document(given.text, given.id, metadata=dict(given.metadata))


def run(stages: Sequence[Stage], logs: Path, workers: int = 1) -> dict[str, dict[str, float]]:
    """Run stages one after the other; gives the totals of the last step of each."""
    found = {}
    for stage in stages:
        executor = LocalPipelineExecutor(stage.steps, stage.tasks, workers, logging_dir=str(logs / stage.name))
        stats = executor.run()
        last = stats.stats[-1] if stats is not None else None
        found[stage.name] = {name: metric.total for name, metric in last.stats.items()} if last else {}
    return found


def read(steps: Sequence[PipelineStep], tasks: int) -> list[Document]:
    """What a pipeline gives, task after task."""
    found = []
    for rank in range(tasks):
        data = None
        for step in steps:
            data = step.run(data, rank, tasks)
        found += list(data)
    return found
