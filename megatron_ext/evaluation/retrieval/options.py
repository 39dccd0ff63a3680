"""Options of retrieval tests."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from megatron_ext.config.schema import STRICT, RunConfig
from megatron_ext.config.suggest import suggest
from megatron_ext.evaluation.retrieval.registry import load_all
from megatron_ext.utils.errors import UserError

LENGTHS = tuple(1024 * 2**power for power in range(8))
"""Default lengths in tokens, 1k to 128k."""


def _check_distinct(values: list[str] | list[int] | list[float]) -> list[str] | list[int] | list[float]:
    if len(set(values)) != len(values):
        raise PydanticCustomError("each_once", "the same value twice")
    return values


def _check_task(name: str) -> str:
    tasks = load_all()
    if name not in tasks:
        raise PydanticCustomError("unknown_name", "unknown", {"hint": suggest(name, tasks)})
    return name


TaskName = Annotated[str, AfterValidator(_check_task)]
Depth = Annotated[float, Field(ge=0.0, le=1.0)]
Unique = AfterValidator(_check_distinct)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RetrievalOptions:
    """Options of retrieval tests. Every task is tested at every length, and at every depth if it has one.

    Attributes:
        tasks: names of the tasks.
        lengths: lengths in tokens of the model, including generated ones.
        depths: relative positions of the answer, from 0 (start of the context) to 1 (end). Only for tasks with one
            such position; other tasks spread theirs over the context.
        samples: samples per task, length and depth.
        seed: seed of the samples. Sample i of a task, length and depth does not depend on the other options.
        haystack: source of the text between needles, in a format of `selectron prepare --input` (JSON lines, Parquet,
            tar archives or text files, alone or in a folder). At most 4 million characters are read. None: RULER's
            noise sentences; niah_single_2 then differs from niah_single_1 only in its random choices.
        unfit: treatment of a length that exceeds the model's maximum or is too short for a task: `refuse` the run, or
            `skip` that length of the task and list it in the results.
    """

    tasks: Annotated[list[TaskName], Field(min_length=1), Unique] = Field(default_factory=lambda: list(load_all()))
    lengths: Annotated[list[PositiveInt], Field(min_length=1), Unique] = Field(default_factory=lambda: list(LENGTHS))
    depths: Annotated[list[Depth], Field(min_length=1), Unique] = Field(
        default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0]
    )
    samples: PositiveInt = 20
    seed: NonNegativeInt = 42
    haystack: str | None = None
    unfit: Literal["refuse", "skip"] = "refuse"


def check_config(options: RetrievalOptions, config: RunConfig) -> None:
    """Check that the model of a run supports every length.

    Raises:
        UserError: a length exceeds `model.max_position_embeddings`, and `unfit` is `refuse`.
    """
    max_length = config.model.max_position_embeddings
    assert max_length is not None, "derived by the configuration"
    too_long = [length for length in options.lengths if length > max_length]
    if too_long and options.unfit == "refuse":
        problem = f"{too_long[0]}, but the model supports at most {max_length} tokens"
        hint = "reduce them, increase model.max_position_embeddings, or set retrieval.unfit=skip"
        raise UserError("retrieval.lengths", problem, hint)
