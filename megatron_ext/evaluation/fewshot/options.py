"""What few-shot tests are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_ext.errors import UserError
from megatron_ext.evaluation.fewshot.published import PUBLISHED_SETS

Split = Literal["published", "validation"]


@dataclass(frozen=True, kw_only=True)
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
        seed: of the choice of examples; lm-eval's own unless told.

    Raises:
        UserError: a number too small, no task, or a split without `data`.
    """

    tasks: tuple[str, ...] = tuple(PUBLISHED_SETS)
    num_fewshot: int | None = None
    limit: int | None = None
    data: Path | None = None
    split: Split = "published"
    include_path: Path | None = None
    seed: int = 1234

    def __post_init__(self) -> None:
        if not self.tasks:
            raise UserError("fewshot.tasks", "no task is named", f"name some of {', '.join(PUBLISHED_SETS)}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise UserError("fewshot.num_fewshot", f"{self.num_fewshot} examples", "use 0 or more")
        if self.limit is not None and self.limit < 1:
            raise UserError("fewshot.limit", f"{self.limit} rows a task", "use 1 or more, or leave it out for all rows")
        if self.split != "published" and self.data is None:
            problem = f"{self.split!r} chooses among the files in fewshot.data, which is not set"
            raise UserError("fewshot.split", problem, "set fewshot.data or leave fewshot.split out")
