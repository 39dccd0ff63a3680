"""Invented questions for seven test sets, in the published format and in lm-eval's columns."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Making = Callable[[random.Random, int], tuple[dict[str, Any], dict[str, Any]]]

THINGS = ["kettle", "ladder", "mitten", "lantern", "teapot", "bucket", "hammock", "rudder", "bellows", "trowel"]
DOINGS = ["leans on", "is kept in", "warms up", "falls behind", "rolls under", "is tied to", "hangs above"]
NAMES = ["Ada", "Bo", "Cleo", "Dov", "Esi", "Finn"]


def _said(dice: random.Random) -> str:
    return f"the {dice.choice(THINGS)} {dice.choice(DOINGS)} the {dice.choice(THINGS)}"


def _piqa(dice: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    row = {"goal": f"So that {_said(dice)} ({number}),", "sol1": f"{_said(dice)}.", "sol2": f"see that {_said(dice)}."}
    return row, {**row, "label": dice.randrange(2)}


def _arc(dice: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return _choices(dice, number, "question", f"Why is it that {_said(dice)}?", dice.choice(["ABCD", "1234", "ABC"]))


def _openbookqa(dice: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return _choices(dice, number, "question_stem", f"Where {_said(dice)}, there", "ABCD")


def _choices(
    dice: random.Random, number: int, column: str, stem: str, labels: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = [_said(dice) for _ in labels]
    common = {"id": f"Q_{number}", "answerKey": dice.choice(labels)}
    listed = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    published = {"question": {"stem": stem, "choices": listed}, **common}
    return published, {column: stem, "choices": {"text": texts, "label": list(labels)}, **common}


def _winogrande(dice: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    one, two = dice.sample(NAMES, 2)
    sentence = f"{one} told {two} that {_said(dice)}, as _ had seen it {number} times."
    row = {"sentence": sentence, "option1": one, "option2": two, "answer": dice.choice("12")}
    return {"qID": f"Q{number}", **row}, row


def _boolq(dice: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a question with a passage of up to a few hundred tokens, more than the small model can read."""
    title, answer = dice.choice(THINGS).capitalize(), dice.random() < 0.5
    passage = ". ".join(_said(dice) for _ in range(1 + 12 * (number % 3))) + "."
    question = f"is it so that {_said(dice)}"
    published = {"question": question, "title": title, "answer": answer, "passage": passage}
    return published, {
        "question": question,
        "passage": f"{title} -- {passage}",
        "idx": number,
        "label": 1 if answer else 0,
    }


def _hellaswag(dice: random.Random, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a row with markup that lm-eval removes from the text."""
    row = {
        "ind": number,
        "activity_label": f"Tidying up {number}",
        "ctx_a": f"[header] How {_said(dice)} [title] First {_said(dice)}. [step] Then",
        "ctx_b": _said(dice),
        "endings": [f"and {_said(dice)}. [substeps]  {_said(dice).capitalize()}." for _ in range(4)],
    }
    label = dice.randrange(4)
    return {**row, "ctx": f"{row['ctx_a']} {row['ctx_b']}", "label": label}, {**row, "label": str(label)}


SETS: dict[str, tuple[Making, dict[str, str]]] = {
    "piqa": (_piqa, {"train": "piqa/train.jsonl", "validation": "piqa/valid.jsonl"}),
    "arc_easy": (
        _arc,
        {
            "train": "arc/ARC-Easy/ARC-Easy-Train.jsonl",
            "validation": "arc/ARC-Easy/ARC-Easy-Dev.jsonl",
            "test": "arc/ARC-Easy/ARC-Easy-Test.jsonl",
        },
    ),
    "arc_challenge": (
        _arc,
        {
            "train": "arc/ARC-Challenge/ARC-Challenge-Train.jsonl",
            "validation": "arc/ARC-Challenge/ARC-Challenge-Dev.jsonl",
            "test": "arc/ARC-Challenge/ARC-Challenge-Test.jsonl",
        },
    ),
    "winogrande": (_winogrande, {"train": "winogrande/train_xl.jsonl", "validation": "winogrande/dev.jsonl"}),
    "openbookqa": (
        _openbookqa,
        {
            "train": "openbookqa/Data/Main/train.jsonl",
            "validation": "openbookqa/Data/Main/dev.jsonl",
            "test": "openbookqa/Data/Main/test.jsonl",
        },
    ),
    "boolq": (_boolq, {"train": "boolq/train.jsonl", "validation": "boolq/dev.jsonl"}),
    "hellaswag": (
        _hellaswag,
        {"train": "hellaswag/hellaswag_train.jsonl", "validation": "hellaswag/hellaswag_val.jsonl"},
    ),
}
"""For each task, a function that makes a row, and the files of its splits in the user's folder."""


def write_questions(published: Path, columns: Path, rows: int = 6) -> None:
    """Write the same questions twice: files as published, and SPLIT.jsonl with lm-eval's columns by task.

    The second form has the columns that lm-eval would read from the hub.
    """
    for task, (make, files) in SETS.items():
        dice = random.Random(task)
        for split, name in files.items():
            both = [make(dice, number) for number in range(rows)]
            write_rows(published / name, [row for row, _ in both])
            write_rows(columns / task / f"{split}.jsonl", [row for _, row in both])
            if task == "piqa":
                labels = "".join(f"{row['label']}\n" for _, row in both)
                (published / name).with_name(f"{Path(name).stem}-labels.lst").write_text(labels)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
