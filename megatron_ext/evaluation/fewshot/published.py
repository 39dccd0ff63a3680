"""Readers of test sets in their authors' file formats, which convert rows to the columns of lm-eval's tasks."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.utils.atomic_files import os_error_reason, read_regular
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json

Row = dict[str, Any]


@dataclass(frozen=True)
class PublishedSet:
    """Source of the rows of an lm-eval task.

    Attributes:
        definition: path of lm-eval's definition of the task, relative to lm-eval's folder of tasks.
        folder: subfolder of the user's folder that contains the files, at any depth.
        files: name patterns of each split's file. The first pattern is the authors' file name; the other patterns match
            exported copies.
        to_row: function from a row of the file and the row's index to a row with lm-eval's columns.
        url: address at which the authors publish the files.
    """

    definition: str
    folder: str
    files: Mapping[str, tuple[str, ...]]
    to_row: Callable[[Row, int], Row]
    url: str


def _piqa(row: Row, index: int) -> Row:
    return {name: row[name] for name in ("goal", "sol1", "sol2")} | {"label": _check_choice(int(row["label"]), (0, 1))}


def _arc(row: Row, index: int) -> Row:
    return _multiple_choice(row, "question")


def _openbookqa(row: Row, index: int) -> Row:
    return _multiple_choice(row, "question_stem")


def _multiple_choice(row: Row, stem_name: str) -> Row:
    """Convert a multiple-choice row. AI2's files have stem and choices in `question`, copies in separate columns."""
    if isinstance(row.get("question"), dict):
        stem, listed = row["question"]["stem"], row["question"]["choices"]
        choices = {name: [choice[name] for choice in listed] for name in ("text", "label")}
    else:
        stem, choices = row[stem_name], {name: list(row["choices"][name]) for name in ("text", "label")}
    _check_choice(row["answerKey"].lstrip(), choices["label"])
    return {"id": row["id"], stem_name: stem, "choices": choices, "answerKey": row["answerKey"]}


def _winogrande(row: Row, index: int) -> Row:
    if "_" not in row["sentence"]:
        raise ValueError("the sentence has no _")
    _check_choice(row["answer"], ("1", "2"))
    return {name: row[name] for name in ("sentence", "option1", "option2", "answer")}


def _boolq(row: Row, index: int) -> Row:
    """Convert a BoolQ row of SuperGLUE or of BoolQ's authors.

    In the authors' rows, the title is a separate field and the label is in `answer`.
    """
    title = f"{row['title']} -- " if "title" in row else ""
    label = row["label"] if "label" in row else row["answer"]
    _check_choice(label, (False, True))
    return {"question": row["question"], "passage": title + row["passage"], "idx": index, "label": int(label)}


def _hellaswag(row: Row, index: int) -> Row:
    """Convert a HellaSwag row of the authors, or of a cleaned copy that has `ctx` instead of `ctx_a` and `ctx_b`.

    With an empty `ctx_b`, lm-eval does not capitalize any part of the context.
    """
    context = {name: row[name] for name in ("ctx_a", "ctx_b")} if "ctx_a" in row else {"ctx_a": row["ctx"], "ctx_b": ""}
    endings = list(row["endings"])
    label = _check_choice(int(row["label"]), range(len(endings)))
    return {
        "ind": row["ind"],
        "activity_label": row["activity_label"],
        **context,
        "endings": endings,
        "label": str(label),
    }


def _check_choice(value: Any, choices: Any) -> Any:
    if value not in choices:
        raise ValueError(f"the answer {value!r} is not one of {list(choices)}")
    return value


def _arc_set(name: str, definition: str) -> PublishedSet:
    published = {"train": "Train", "validation": "Dev", "test": "Test"}
    files = {split: (f"{name}-{word}.jsonl", f"{name}*{split}*.jsonl") for split, word in published.items()}
    return PublishedSet(definition, "arc", files, _arc, "https://allenai.org/data/arc")


PUBLISHED_SETS: dict[str, PublishedSet] = {
    "piqa": PublishedSet(
        "piqa/piqa.yaml",
        "piqa",
        {"train": ("train.jsonl", "*train*.jsonl"), "validation": ("valid.jsonl", "*validation*.jsonl")},
        _piqa,
        "https://yonatanbisk.com/piqa/data/",
    ),
    "arc_easy": _arc_set("ARC-Easy", "arc/arc_easy.yaml"),
    "arc_challenge": _arc_set("ARC-Challenge", "arc/arc_challenge.yaml"),
    "winogrande": PublishedSet(
        "winogrande/default.yaml",
        "winogrande",
        {
            "train": ("train_xl.jsonl", "winogrande_xl*train*.jsonl"),
            "validation": ("dev.jsonl", "winogrande_xl*validation*.jsonl"),
        },
        _winogrande,
        "https://winogrande.allenai.org",
    ),
    "openbookqa": PublishedSet(
        "openbookqa/openbookqa.yaml",
        "openbookqa",
        {
            "train": ("train.jsonl", "main*train*.jsonl"),
            "validation": ("dev.jsonl", "main*validation*.jsonl"),
            "test": ("test.jsonl", "main*test*.jsonl"),
        },
        _openbookqa,
        "https://allenai.org/data/open-book-qa",
    ),
    "boolq": PublishedSet(
        "super_glue/boolq/default.yaml",
        "boolq",
        {"train": ("train.jsonl", "*train*.jsonl"), "validation": ("val.jsonl", "dev.jsonl", "*validation*.jsonl")},
        _boolq,
        "https://super.gluebenchmark.com/tasks",
    ),
    "hellaswag": PublishedSet(
        "hellaswag/hellaswag.yaml",
        "hellaswag",
        {
            "train": ("hellaswag_train.jsonl", "*train*.jsonl"),
            "validation": ("hellaswag_val.jsonl", "*validation*.jsonl"),
        },
        _hellaswag,
        "https://github.com/rowanz/hellaswag/tree/master/data",
    ),
}
"""Supported test sets by the name of their lm-eval task."""


def find_file(task: str, split: str, data: Path) -> Path:
    """Find the file of a split of a task.

    Args:
        task: one of `PUBLISHED_SETS`.
        split: train, validation or test.
        data: the user's folder, with a subfolder for each test set.

    Raises:
        UserError: no file matches, or several match the same pattern.
    """
    test_set = PUBLISHED_SETS[task]
    folder = data / test_set.folder
    for name in test_set.files[split]:
        found = sorted(folder.rglob(name))
        if len(found) > 1:
            raise UserError(
                "fewshot.data", f"{found[0]} and {found[1]} could both be {task}'s {split} rows", "keep one"
            )
        if found:
            return found[0]
    hint = f"get the file from {test_set.url}"
    if split != "validation":
        hint += ", or set fewshot.split=validation to use only the validation rows"
    missing = folder / test_set.files[split][0]
    raise UserError("fewshot.data", f"{task}'s {split} rows are missing: {missing}", hint)


def read_rows(task: str, path: Path) -> list[Row]:
    """Read the rows of a task's file, with lm-eval's columns and in the order of the file.

    Args:
        task: one of `PUBLISHED_SETS`.
        path: file with one JSON object per line.

    Raises:
        UserError: a line is not a row of this test set (the error gives its number), or the file has no rows.
    """
    to_row = PUBLISHED_SETS[task].to_row
    rows = []
    for index, (line, row) in enumerate(_read_labelled_rows(path)):
        try:
            rows.append(to_row(row, index))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"no field {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"{path}:{line}", f"not a row of {task}: {problem}", _HINT) from error
    if not rows:
        raise UserError(str(path), "has no rows", _HINT)
    return rows


_HINT = "use the file as published by its authors"


def _read_labelled_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield line numbers and rows, with the labels of a separate `-labels.lst` file if there is one (PIQA)."""
    rows = list(_parse_rows(path))
    labels_path = path.with_name(f"{path.stem}-labels.lst")
    if not labels_path.exists():
        yield from rows
        return
    labels = _read_file(labels_path).decode().split()
    if len(labels) != len(rows):
        raise UserError(str(labels_path), f"{len(labels)} labels for the {len(rows)} rows of {path.name}", _HINT)
    for (line, row), label in zip(rows, labels, strict=True):
        yield line, {**row, "label": label}


def _read_file(path: Path) -> bytes:
    try:
        return read_regular(path)
    except OSError as error:
        raise UserError(str(path), f"cannot be read ({os_error_reason(error)})", _HINT) from None


def _parse_rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(io.BytesIO(_read_file(path)), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}", f"not JSON: {error}", _HINT) from error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}", "a row is an object with named fields", _HINT)
        yield number, row
