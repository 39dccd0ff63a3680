"""Test sets in their published formats, and errors for other formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from questions import SETS, write_questions, write_rows

from megatron_ext.evaluation.fewshot.published import PUBLISHED_SETS, Row, find_file, read_rows
from megatron_ext.utils.errors import UserError

CHOICES = {"text": ["a ladder", "a kettle"], "label": ["A", "B"]}
HELLASWAG = {"ind": 4, "activity_label": "Tidying", "endings": ["one.", "two."], "label": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    write_questions(folder / "published", folder / "columns")
    return folder


@pytest.mark.parametrize(("task", "split"), [(task, split) for task, (_, files) in SETS.items() for split in files])
def test_files_as_published_become_lm_evals_columns(task: str, split: str, folder: Path) -> None:
    path = find_file(task, split, folder / "published")
    assert path == folder / "published" / SETS[task][1][split]
    columns = (folder / "columns" / task / f"{split}.jsonl").read_text().splitlines()
    assert read_rows(task, path) == [json.loads(line) for line in columns]


@pytest.mark.parametrize(
    ("task", "name", "given", "changed"),
    [
        ("piqa", "validation-00000", {"goal": "g", "sol1": "a", "sol2": "b", "label": 1}, {}),
        ("arc_easy", "ARC-Easy-validation", {"id": "7", "question": "Why?", "choices": CHOICES, "answerKey": "B"}, {}),
        ("openbookqa", "main-validation", {"id": "7", "question_stem": "So", "choices": CHOICES, "answerKey": "A"}, {}),
        ("boolq", "val", {"question": "is it", "passage": "Tea -- It is.", "idx": 0, "label": True}, {"label": 1}),
        # Preprocessed rows:
        ("hellaswag", "validation", HELLASWAG | {"ctx": "Then"}, {"label": "1", "ctx_a": "Then", "ctx_b": ""}),
    ],
)
def test_forms_of_copies(task: str, name: str, given: Row, changed: Row, tmp_path: Path) -> None:
    path = tmp_path / PUBLISHED_SETS[task].folder / f"{name}.jsonl"
    write_rows(path, [given])
    assert find_file(task, "validation", tmp_path) == path
    (row,) = read_rows(task, path)
    assert row == {key: value for key, value in (given | changed).items() if key != "ctx"}


def test_a_copy_of_boolq_without_titles(tmp_path: Path) -> None:
    write_rows(tmp_path / "dev.jsonl", [{"question": "is it", "passage": "It is.", "answer": False}] * 2)
    expected = {"question": "is it", "passage": "It is.", "label": 0}
    assert read_rows("boolq", tmp_path / "dev.jsonl") == [{**expected, "idx": 0}, {**expected, "idx": 1}]


def test_text_that_was_cleaned_up_asks_the_same(tmp_path: Path) -> None:
    """lm-eval's preprocessing of preprocessed text changes nothing."""
    import datasets
    from lm_eval.tasks.hellaswag.utils import process_docs

    raw = {**HELLASWAG, "ctx_a": "[header] Tidy [title] First.", "ctx_b": "then it rolls", "ctx": "not read"}
    clean = {**HELLASWAG, "ctx": "Tidy. First. Then it rolls"}
    found = []
    for number, row in enumerate((raw, clean)):
        path = tmp_path / f"{number}.jsonl"
        write_rows(path, [row])
        (doc,) = process_docs(datasets.Dataset.from_list(read_rows("hellaswag", path)))
        found.append((doc["query"], doc["choices"], doc["gold"]))
    assert found[0] == found[1] == ("Tidying: Tidy. First. Then it rolls", ["one.", "two."], 1)


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("piqa", '{"goal": "g", "sol1": "a", "label": 0}', "no field 'sol2'"),
        ("piqa", '{"goal": "g", "sol1": "a", "sol2": "b", "label": 2}', "the answer 2 is not one of"),
        (
            "arc_easy",
            json.dumps({"id": "7", "question": "Why?", "choices": CHOICES, "answerKey": "C"}),
            "the answer 'C'",
        ),
        ("arc_easy", '{"id": "7", "question": "Why?", "choices": 3, "answerKey": "C"}', "not a row of arc_easy"),
        (
            "winogrande",
            '{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}',
            "the sentence has no _",
        ),
        ("winogrande", '{"sentence": "a _", "option1": "a", "option2": "b", "answer": ""}', "the answer ''"),
        ("boolq", '{"question": "q", "passage": "p", "answer": "yes"}', "the answer 'yes'"),
        ("hellaswag", json.dumps({**HELLASWAG, "ctx": "c", "label": 2}), "the answer 2"),
        ("hellaswag", '["a list"]', "an object with named fields"),
        ("hellaswag", '{"ind": 3, ', "not JSON"),
        ("hellaswag", b'{"ctx": "\xff"}', "not JSON"),
    ],
)
def test_a_damaged_row_is_named(task: str, line: str | bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UserError) as caught:
        read_rows(task, path)
    assert caught.value.where == f"{path}:2"
    assert said in caught.value.problem


def test_a_file_without_rows_and_labels_that_are_too_few(tmp_path: Path) -> None:
    (tmp_path / "valid.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no rows"):
        read_rows("piqa", tmp_path / "valid.jsonl")
    write_rows(tmp_path / "valid.jsonl", [{"goal": "g", "sol1": "a", "sol2": "b"}] * 3)
    (tmp_path / "valid-labels.lst").write_text("0\n1\n")
    with pytest.raises(UserError, match=r"2 labels for the 3 rows of valid\.jsonl"):
        read_rows("piqa", tmp_path / "valid.jsonl")


def test_a_missing_file_is_named_and_where_it_is_had(tmp_path: Path) -> None:
    for task, (_, files) in SETS.items():
        for split in files:
            with pytest.raises(UserError) as caught:
                find_file(task, split, tmp_path)
            assert str(tmp_path / PUBLISHED_SETS[task].folder) in caught.value.problem
            assert "https://" in caught.value.hint
            assert ("fewshot.split=validation" in caught.value.hint) == (split != "validation")
    with pytest.raises(UserError, match=r"piqa/train\.jsonl; get the file from https://yonatanbisk"):
        find_file("piqa", "train", tmp_path)


def test_of_two_files_none_is_guessed(tmp_path: Path) -> None:
    for name in ("piqa/a/valid.jsonl", "piqa/b/valid.jsonl"):
        write_rows(tmp_path / name, [])
    with pytest.raises(UserError, match=r"a/valid.jsonl and .*b/valid.jsonl could both be"):
        find_file("piqa", "validation", tmp_path)
