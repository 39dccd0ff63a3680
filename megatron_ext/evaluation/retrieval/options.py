"""What is tested, and how often."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from megatron_ext.config.schema import STRICT

TaskName = Literal[
    "passkey",
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "mqar",
    "selective_copying",
    "induction",
]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
LENGTHS = tuple(1024 * 2**power for power in range(8))
"""1k to 128k."""


def _each_once(values: list[TaskName] | list[int] | list[float]) -> list[TaskName] | list[int] | list[float]:
    if len(set(values)) != len(values):
        raise PydanticCustomError("each_once", "the same one twice")
    return values


Depth = Annotated[float, Field(ge=0.0, le=1.0)]
Once = AfterValidator(_each_once)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RetrievalOptions:
    """Tests of retrieval: every task at every length, those with a depth at every depth.

    Attributes:
        tasks: their names.
        lengths: tokens of the model's own, those that it generates included.
        depths: where the answer stands, from 0 (the context's start) to 1 (its end). For tasks with one place only;
            the others have theirs all over the context.
        samples: of a task, length and depth.
        seed: of the samples; sample i of a task, length and depth is the same whatever else is tested.
        haystack: text between the needles, up to 4 million characters of it: what `selectron prepare --input` reads,
            JSON lines, Parquet, tars or files of text, alone or in a folder; None: RULER's noise sentences, so that
            niah_single_2 is niah_single_1 but for what is drawn.
        unfit: what happens to a length beyond the model's, or too short for a task in the model's tokens: the run is
            refused, or that length is left out and the results say so.
    """

    tasks: Annotated[list[TaskName], Field(min_length=1), Once] = Field(default_factory=lambda: list(TASK_NAMES))
    lengths: Annotated[list[PositiveInt], Field(min_length=1), Once] = Field(default_factory=lambda: list(LENGTHS))
    depths: Annotated[list[Depth], Field(min_length=1), Once] = Field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    samples: PositiveInt = 20
    seed: NonNegativeInt = 42
    haystack: str | None = None
    unfit: Literal["refuse", "skip"] = "refuse"
