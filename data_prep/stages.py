"""A stage of work for one of datatrove's executors: steps that run in order, in so many tasks."""

from __future__ import annotations

from dataclasses import dataclass

from datatrove.pipeline.base import PipelineStep


@dataclass(frozen=True)
class Stage:
    """What one executor runs before the next one starts.

    Attributes:
        name: of the stage, for its folder of logs and completion marks.
        steps: the pipeline.
        tasks: number of tasks that the input is cut into; any number of workers may share them.
    """

    name: str
    steps: list[PipelineStep]
    tasks: int
