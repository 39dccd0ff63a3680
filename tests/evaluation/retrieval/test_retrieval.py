"""Every task is solved by rules that read the prompt, and by nothing that ignores it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from readers import Letters, after_the_last_one_like_it, next_copied, read

from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.registry import load_all
from megatron_ext.evaluation.retrieval.report import markdown, write_results
from megatron_ext.evaluation.retrieval.results import RetrievalResults, wilson_interval
from megatron_ext.evaluation.retrieval.run import evaluate_retrieval
from megatron_ext.evaluation.retrieval.scoring import first_integer, string_match_all
from megatron_ext.utils.errors import UserError

LENGTHS, DEPTHS = [3500, 14_000], [0.0, 0.5, 1.0]
TOKEN_TASKS = ("mqar", "selective_copying", "induction")
TEXT_TASKS = [name for name in load_all() if name not in TOKEN_TASKS]


def run(model: Letters, **given: Any) -> RetrievalResults:
    return evaluate_retrieval(model, RetrievalOptions(**{"samples": 2, "depths": DEPTHS, **given}))


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_the_answer_can_be_read_in_the_prompt_and_not_guessed(task: Any) -> None:
    model = Letters(read, after_the_last_one_like_it)
    results = run(model, tasks=[task], lengths=LENGTHS)
    assert {record.score for record in results.records} == {1.0}
    depths = {record.depth for record in results.records}
    assert depths in (set(DEPTHS), {None})
    assert len(results.records) == len(LENGTHS) * len(depths) * 2
    assert len(set(model.prompts)) == len(model.prompts)
    blind = run(Letters(lambda _: "12 no-idea", after_the_last_one_like_it), tasks=[task], lengths=LENGTHS)
    assert max(record.score for record in blind.records) < 0.3


@pytest.mark.parametrize("task", TOKEN_TASKS)
def test_tokens_are_foretold_from_those_before(task: Any) -> None:
    for length in (128, 999):
        rule = next_copied(length) if task == "selective_copying" else after_the_last_one_like_it
        found = run(Letters(read, rule), tasks=[task], lengths=[length], samples=5)
        assert {record.score for record in found.records} == {1.0}
        assert {record.tokens for record in found.records} == {length}
        blind = run(Letters(read, lambda context: context[0]), tasks=[task], lengths=[length], samples=5)
        assert sum(record.score for record in blind.records) / len(blind.records) < 0.2


@pytest.mark.parametrize("task", ["passkey", *(name for name in TEXT_TASKS if name.startswith("niah"))])
def test_prompts_fill_the_length_and_no_more(task: Any) -> None:
    room = {"passkey": 16}.get(task, 128)
    for record in run(Letters(read, after_the_last_one_like_it), tasks=[task], lengths=LENGTHS).records:
        assert record.length - 300 < record.tokens + room <= record.length  # no further piece of the haystack fits


@pytest.mark.parametrize("depth", [0.0, 0.25, 1.0])
def test_the_needle_lies_at_its_depth(depth: float) -> None:
    model = Letters(read, after_the_last_one_like_it)
    results = run(model, tasks=["passkey", "niah_single_1"], lengths=[9000], depths=[depth], samples=3)
    for record, prompt in zip(results.records, model.prompts, strict=True):
        body = prompt.split("\n", 1)[1].rsplit("\n", 1)[0]  # without the task's introduction and the question
        needle = "The pass key is" if record.task == "passkey" else "One of the special magic"
        assert body.index(needle) / len(body) == pytest.approx(depth, abs=0.02)


def test_words_are_as_frequent_as_they_say() -> None:
    model = Letters(read, after_the_last_one_like_it)
    common = run(model, tasks=["cwe"], lengths=[14_000], samples=1).records[0]
    words = Counter(re.findall(r"\d+\. (\S+)", model.prompts[-1].split("Below is")[-1].split("\nQuestion")[0]))
    assert {word for word, count in words.items() if count == 30} == set(common.references)
    assert set(words.values()) == {30, 3}
    frequent = run(model, tasks=["fwe"], lengths=[14_000], samples=1).records[0]
    body = model.prompts[-1].split("words. ")[1].split("\nQuestion")[0].split()
    (dots, most), *others = Counter(body).most_common(6)
    assert dots == "..."
    assert [count for _, count in others] == pytest.approx([most / rank**2 for rank in range(2, 7)], abs=1.01)
    assert [word for word, _ in others[:3]] == list(frequent.references)


def test_a_sample_depends_on_its_own_place_and_the_seed_alone() -> None:
    model = Letters(read, after_the_last_one_like_it)
    records = run(model, tasks=["niah_multikey_1", "vt"], lengths=LENGTHS, samples=3).records
    again = run(model, tasks=["vt"], lengths=LENGTHS[:1], samples=2).records
    assert all(record in records for record in again)
    other = run(model, tasks=["vt"], lengths=LENGTHS[:1], samples=2, seed=7).records
    assert all(record.references not in {one.references for one in records} for record in other)


def test_needles_have_keys_of_their_own() -> None:
    model = Letters(read, after_the_last_one_like_it)
    run(model, tasks=["niah_multikey_2", "niah_multikey_3"], lengths=[14_000], samples=1, depths=[0.5])
    for prompt in model.prompts:
        needles = re.findall(r"for (\S+) is: (\S+)\.", prompt)
        assert len(needles) > 50
        assert len({key for key, _ in needles}) == len({value for _, value in needles}) == len(needles)


def test_a_text_of_the_users_is_the_haystack(tmp_path: Path) -> None:
    words = [f"Sentence number {number} tells of nothing much." for number in range(400)]
    (tmp_path / "hay.txt").write_text(" ".join(words))
    model = Letters(read, after_the_last_one_like_it)
    results = run(model, tasks=["niah_single_2"], lengths=[4000], haystack=str(tmp_path / "hay.txt"))
    assert {record.score for record in results.records} == {1.0}
    assert results.haystack == str(tmp_path / "hay.txt")
    assert all(len(re.findall(r"Sentence number \d+ tells of nothing much\.", one)) > 50 for one in model.prompts)


def test_what_does_not_fit_is_refused_or_said() -> None:
    model = Letters(read, after_the_last_one_like_it, max_length=4000)
    with pytest.raises(UserError, match=r"14000 does not fit passkey: the model supports at most 4000 tokens"):
        run(model, tasks=["passkey"], lengths=LENGTHS)
    assert model.prompts == []  # the model was never called
    results = run(model, tasks=["passkey", "vt"], lengths=[100, 3500], unfit="skip")
    assert [(one.task, one.length) for one in results.skipped] == [("passkey", 100), ("vt", 100)]
    assert {record.length for record in results.records} == {3500}
    assert "* vt at 100 tokens: the shortest sample takes" in markdown(results)


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [("The ABC and def", ("abc", "DEF"), 1.0), ("abc", ("abc", "def"), 0.5), ("", ("abc",), 0.0)],
)
def test_references_are_found_in_any_case(answer: str, references: tuple[str, ...], score: float) -> None:
    assert string_match_all(answer, references) == score


@pytest.mark.parametrize(
    ("answer", "score"), [(" 17.", 1.0), ("017", 1.0), ("it is 17", 1.0), ("171", 0.0), ("no", 0.0), ("1 17", 0.0)]
)
def test_the_first_integer_counts(answer: str, score: float) -> None:
    assert first_integer(answer, ("17",)) == score


def test_wilsons_interval() -> None:
    """Compare with Wilson (1927), also where a normal interval would have zero width."""
    assert wilson_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson_interval(1.0, 20) == pytest.approx((0.8389, 1.0), abs=1e-4)


def test_results_are_written(tmp_path: Path) -> None:
    results = run(Letters(read, after_the_last_one_like_it), tasks=["passkey", "mqar"], lengths=[500, 3500])
    write_results(results, {"step": 9}, tmp_path)
    numbers = json.loads((tmp_path / "retrieval.json").read_text())
    assert (numbers["step"], numbers["schema"], len(numbers["records"])) == (
        9,
        "selectron.retrieval.1",
        2 * 2 * 3 + 2 * 2,
    )
    assert (tmp_path / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "retrieval.md").read_text() == markdown(results)
    assert len((tmp_path / "retrieval.csv").read_text().splitlines()) == 1 + 2 * 3 + 2
