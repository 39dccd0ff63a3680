"""What few-shot tests are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_ext.config.schema import STRICT
from megatron_ext.errors import UserError
from megatron_ext.evaluation.fewshot.published import PUBLISHED_SETS

Split = Literal["published", "validation"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FewshotOptions:
    """What to test on.

    Attributes:
        tasks: lm-eval's names of tasks, groups and tags.
        num_fewshot: examples before each question; None: as many as a task says, most often none.
        limit: rows a task, the first ones; None: all.
        data: folder with the files of `PUBLISHED_SETS`, one folder each; None: those tasks, too, read what lm-eval
            does, from the Hugging Face hub, as all other tasks and groups do.
        split: rows of the tasks over `data`; see `local_task`.
        include_path: folder of the user's own definitions; None: lm-eval's alone.
        confirm_run_unsafe_code: run what the model writes where a task judges it so, on every rank, with the rights of
            this process; else such tasks are refused.
        seed: of the choice of examples, and of what tasks have drawn; lm-eval's own unless told.

    Raises:
        UserError: a split without `data`.
    """

    tasks: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(PUBLISHED_SETS)
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveInt | None = None
    data: Path | None = None
    split: Split = "published"
    include_path: Path | None = None
    confirm_run_unsafe_code: bool = False
    seed: NonNegativeInt = 1234

    def __post_init__(self) -> None:
        if self.split != "published" and self.data is None:
            problem = f"{self.split!r} chooses among the files in fewshot.data, which is not set"
            raise UserError("fewshot.split", problem, "set fewshot.data or leave fewshot.split out")
