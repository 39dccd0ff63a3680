"""Options of few-shot tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from megatron_ext.config.schema import STRICT
from megatron_ext.evaluation.fewshot.published import PUBLISHED_SETS
from megatron_ext.utils.errors import UserError

Split = Literal["published", "validation"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FewshotOptions:
    """Options of few-shot tests.

    Attributes:
        tasks: names of tasks, groups and tags in lm-eval.
        num_fewshot: few-shot examples before each question; None: the default of each task, usually none.
        limit: maximum rows per task, the first ones; None: all.
        data: folder with the files of `PUBLISHED_SETS`, one subfolder each; None: read their rows from the Hugging
            Face hub. All other tasks and groups always read the sources of their lm-eval definition.
        split: rows of the tasks that are read from `data`; see `local_task`.
        include_path: folder of the user's own task definitions; None: only those of lm-eval.
        confirm_run_unsafe_code: allow tasks that run code written by the model, on every rank and with the rights of
            this process; False: refuse such tasks.
        seed: seed of the choice of examples and of sampling; the default is lm-eval's.

    Raises:
        UserError: `split` is set without `data`.
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
            raise UserError("fewshot.split", problem, "set fewshot.data or remove fewshot.split")
