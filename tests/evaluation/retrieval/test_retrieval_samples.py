"""Samples of every generator, checked by independent means."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from retrieval_fakes import END, Characters, Words, coded, listed, resolve

from megatron_ext.evaluation.retrieval.alphabet import ordinary_tokens
from megatron_ext.evaluation.retrieval.haystack import NOISE, read_haystack
from megatron_ext.evaluation.retrieval.options import LENGTHS
from megatron_ext.evaluation.retrieval.registry import TextTask, load_all
from megatron_ext.evaluation.retrieval.samples import DoesNotFitError, SampleInputs, SampleKey, TextSample, TokenSample
from megatron_ext.evaluation.retrieval.words import words

TASKS = load_all()
TEXT_TASKS = [name for name, task in TASKS.items() if isinstance(task, TextTask)]
NEEDLES = [name for name in TEXT_TASKS if name.startswith("niah")]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with distinguishable sentences: the n-th sentence contains its number."""
    path = tmp_path_factory.mktemp("hay") / "stories.txt"
    path.write_text("".join(f"Sentence {number} is\nof  no account. " for number in range(5000)))
    return path


def _inputs(haystack: Path | None = None, tokenizer: Any = None) -> SampleInputs:
    encode = (tokenizer or Words()).encode
    return SampleInputs(encode, read_haystack(haystack and str(haystack)), ordinary_tokens(encode, END))


def _sample_key(name: Any, length: int, depth: float = 0.5, index: int = 0) -> SampleKey:
    return SampleKey(name, length, depth if TASKS[name].has_depth else None, 1, index)


def _text(name: str, length: int = 4096, depth: float = 0.5, index: int = 0, hay: Path | None = None) -> TextSample:
    sample = TASKS[name].sample(_sample_key(name, length, depth, index), _inputs(hay))
    assert isinstance(sample, TextSample)
    return sample


def _tokens(name: str, length: int = 512, depth: float = 0.5, index: int = 0) -> TokenSample:
    sample = TASKS[name].sample(_sample_key(name, length, depth, index), _inputs())
    assert isinstance(sample, TokenSample)
    return sample


def test_the_built_in_tasks_are_registered() -> None:
    numbered = {f"niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)}
    needles = numbered | {"niah_multivalue", "niah_multiquery"}
    assert set(TASKS) == needles | {"passkey", "vt", "cwe", "fwe", "mqar", "selective_copying", "induction"}


@pytest.mark.parametrize("name", TASKS)
def test_samples_fill_their_length(name: str) -> None:
    inputs = _inputs()
    for length in (*LENGTHS[:5], 3000):
        task, sample_key = TASKS[name], _sample_key(name, length)
        sample = task.sample(sample_key, inputs)
        room = length - (sample.max_tokens if isinstance(sample, TextSample) else 0)
        one_more = {"cwe": 3 * 5, "fwe": 40, "niah_multikey_3": 50}.get(name, 35)
        assert room - one_more < len(sample.tokens) <= room
        if isinstance(sample, TextSample):
            assert list(sample.tokens) == inputs.encode(sample.text)


@pytest.mark.parametrize("name", ["passkey", "niah_multikey_2", "cwe", "fwe"])
def test_samples_fill_128k_tokens(name: str) -> None:
    sample = _text(name, LENGTHS[-1])
    assert 0 <= LENGTHS[-1] - sample.max_tokens - len(sample.tokens) < 50


@pytest.mark.parametrize("name", TEXT_TASKS)
def test_no_more_hay_would_fit(name: str) -> None:
    """A linear search over all haystack sizes ends at the same prompt."""
    task, inputs, sample_key = TASKS[name], _inputs(), _sample_key(name, 1500)
    assert isinstance(task, TextTask)
    draft, sample = task.draft(sample_key, inputs.haystack), task.sample(sample_key, inputs)
    size = draft.min_size
    assert isinstance(sample, TextSample)
    while len(inputs.encode(draft.prompt(size + 1))) + task.max_tokens <= 1500:
        size += 1
    assert sample.text == draft.prompt(size)


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_their_places(name: str) -> None:
    """A sample depends only on its key: index, seed and length. Samples generated earlier do not change it."""
    task, inputs, sample_key = TASKS[name], _inputs(), _sample_key(name, 2048)
    first = task.sample(sample_key, inputs)
    others = [
        task.sample(SampleKey(sample_key.task, length, sample_key.depth, seed, index), inputs)
        for length, seed, index in [(2048, 1, 1), (2048, 2, 0), (1800, 1, 0)]
    ]
    assert task.sample(sample_key, inputs) == first
    assert len({sample.tokens for sample in (first, *others)}) == 4


def test_samples_are_the_same_in_another_process() -> None:
    code = (
        "from megatron_ext.evaluation.retrieval.samples import SampleKey\n"
        "print(SampleKey('vt', 4096, None, 7, 3).random('names').getrandbits(64))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) == SampleKey("vt", 4096, None, 7, 3).random("names").getrandbits(64)


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_the_pass_key_stands_at_its_depth(depth: float) -> None:
    sample = _text("passkey", depth=depth)
    found = re.findall(r"The pass key is (\d+)\. Remember it\. (\d+) is the pass key\.", sample.text)
    assert found == [(*sample.references, *sample.references)]
    before, after = (part.count(NOISE) for part in sample.text.split("Remember it"))
    assert before == int((before + after) * depth)
    assert sample.text.endswith("\nWhat is the pass key? The pass key is")


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.75, 1.0])
@pytest.mark.parametrize("name", [name for name in NEEDLES if TASKS[name].has_depth])
def test_the_needle_stands_at_its_depth(name: str, depth: float, stories: Path) -> None:
    sample = _text(name, 2048, depth, hay=stories)
    (query,) = re.findall(r"text\? The special magic \w+ for (\S+) mentioned", sample.text)
    context = sample.text.split("afterwards.\n")[1].split("\nWhat is")[0]
    segments = re.findall(r"One of the .*?\.(?=\s|$)|Sentence \d+ is of no account\.|The grass .*? again\.", context)
    needle = [at for at, piece in enumerate(segments) if f"for {query} is: {sample.references[0]}." in piece]
    assert len(needle) == 1
    others = {"niah_multikey_1": 3}.get(name, 0)
    assert abs(needle[0] - (len(segments) - 1) * depth) <= others + 1
    if depth in (0.0, 1.0):
        assert needle[0] == (len(segments) - 1) * int(depth)


@pytest.mark.parametrize(
    ("name", "needles", "keys", "value"),
    [
        ("niah_single_1", 1, 1, r"[1-9]\d{6}"),
        ("niah_single_3", 1, 1, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
        ("niah_multikey_1", 4, 4, r"[1-9]\d{6}"),
        ("niah_multivalue", 4, 1, r"[1-9]\d{6}"),
        ("niah_multiquery", 4, 4, r"[1-9]\d{6}"),
    ],
)
def test_needles_are_as_many_as_in_rulers_table(name: str, needles: int, keys: int, value: str, stories: Path) -> None:
    sample = _text(name, hay=stories)
    found = re.findall(rf"One of the special magic \w+s for ([a-z]+-[a-z]+) is: ({value})\.", sample.text)
    assert len(found) == needles == len({value for _, value in found})
    assert len({key for key, _ in found}) == keys
    asked = re.findall(r"mentioned in the provided text\? The special magic \w+ for (.*) mentioned", sample.text)[0]
    assert {value for key, value in found if key in re.split(r", and |, ", asked)} == set(sample.references)


@pytest.mark.parametrize(
    ("name", "key"), [("niah_multikey_2", r"[a-z]+-[a-z]+"), ("niah_multikey_3", r"[0-9a-f-]{36}")]
)
def test_a_haystack_of_needles_holds_no_key_twice(name: str, key: str) -> None:
    found = re.findall(rf"for ({key}) is: (\S+)\.\n", _text(name, 32768).text)
    assert len(found) > 600
    assert len({key for key, _ in found}) == len({value for _, value in found}) == len(found)


def test_hay_is_the_users_text_in_its_order(stories: Path) -> None:
    numbers = [
        int(one) for one in re.findall(r"Sentence (\d+) is of no account\.", _text("niah_single_2", hay=stories).text)
    ]
    assert len(numbers) > 400
    assert numbers == [(numbers[0] + step) % 5000 for step in range(len(numbers))]


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("index", range(5))
def test_chains_of_variables_resolve(length: int, index: int) -> None:
    sample = _text("vt", length, index=index)
    example, asked = sample.text.split("\n\nMemorize")
    assert resolve(asked) == list(sample.references)
    assert resolve(sample.text) == list(sample.references)
    assert resolve(example) == example.split("they are: ")[1].split()
    assert [len(name) for name in sample.references] == [5] * 5
    assert asked.endswith("5 variables are assigned the value " + re.findall(r"= (\d+)", asked)[0] + ", they are: ")


@pytest.mark.parametrize(("length", "repeats"), [(2048, (6, 1)), (4096, (30, 3)), (16384, (30, 3))])
def test_common_words_stand_as_often_as_said(length: int, repeats: tuple[int, int]) -> None:
    sample = _text("cwe", length)
    counts = Counter(listed(sample.text))
    assert {word for word, count in counts.items() if count == repeats[0]} == set(sample.references)
    assert set(counts.values()) == set(repeats)
    assert len(sample.references) == 10
    shown, answer = sample.text.split(" Answer: ", 1)[0], re.findall(r"are: (1\. .*)\n", sample.text)[0]
    example = Counter(listed(shown))
    assert {word for word, _ in example.most_common(10)} == set(re.findall(r"\d\. (\S+)", answer))
    assert not set(example) & set(counts)


@pytest.mark.parametrize("length", [1024, 1100, 4096, 16384])
def test_frequent_words_fall_as_zipf_says(length: int) -> None:
    sample = _text("fwe", length)
    counts = Counter(coded(sample.text)).most_common()
    dots = sample.text.count(" ...") - 1  # the question also quotes the dots
    assert [word for word, _ in counts[:3]] == list(sample.references)
    assert counts[2][1] > counts[3][1]
    assert all(abs(count - dots / rank**2) < 1 for rank, (_, count) in enumerate(counts, 2))


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("length", [64, 1024])
def test_recall_is_what_a_dictionary_says(length: int, index: int) -> None:
    sample = _tokens("mqar", length, index=index)
    pairs = dict(zip(sample.tokens[0:32:2], sample.tokens[1:32:2], strict=True))
    assert len(set(sample.tokens[:32])) == 32
    assert {sample.tokens[at - 1] for at in sample.scored} == set(pairs)
    assert all(sample.tokens[at] == pairs[sample.tokens[at - 1]] for at in sample.scored)
    assert len(sample.scored) == 16
    queries = {at + step for at in sample.scored for step in (-1, 0)}
    rest = {token for at, token in enumerate(sample.tokens[32:], 32) if at not in queries}
    assert not rest & set(sample.tokens[:32])


def test_recalls_gaps_are_near_more_often_than_far() -> None:
    """Gaps are log-uniform, so half of the logarithmic range holds about half of the queries."""
    gaps = [(at - 33) // 2 + 1 for index in range(20) for at in _tokens("mqar", 8192, index=index).scored]
    near = sum(gap <= math.sqrt(4080) for gap in gaps) / len(gaps)
    assert 0.4 < near < 0.85  # drawn without repetition, so short gaps run out


@pytest.mark.parametrize("index", range(5))
def test_what_is_to_be_copied_stands_between_blanks(index: int) -> None:
    sample = _tokens("selective_copying", 256, index=index)
    context, (mark, *copied) = sample.tokens[:-17], sample.tokens[-17:]
    blank = Counter(context).most_common(1)[0][0]
    assert [token for token in context if token != blank] == copied
    assert mark not in (*context, *copied)
    assert sample.scored == tuple(range(240, 256))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_segment_comes_again(depth: float) -> None:
    sample = _tokens("induction", 512, depth)
    segment = sample.tokens[-8:]
    start = int((512 - 16) * depth)
    assert sample.tokens[start : start + 8] == segment
    counts = Counter(sample.tokens)
    assert [counts[token] for token in segment] == [2] * 8
    assert sample.scored == tuple(range(505, 512))


def test_a_length_too_short_is_reported() -> None:
    characters = _inputs(tokenizer=Characters())
    with pytest.raises(DoesNotFitError, match=r"the shortest sample takes 19\d\d tokens"):
        TASKS["cwe"].sample(_sample_key("cwe", 1024), characters)
    with pytest.raises(DoesNotFitError, match="64 tokens"):
        TASKS["mqar"].sample(_sample_key("mqar", 63), characters)
    few = SampleInputs(characters.encode, characters.haystack, range(20))
    with pytest.raises(DoesNotFitError, match="only 20 are ordinary"):
        TASKS["mqar"].sample(_sample_key("mqar", 512), few)


def test_no_word_holds_another_one() -> None:
    every = [*words("adjectives"), *words("nouns")]
    assert len(set(every)) == len(every) > 900
    assert [(one, other) for one in every for other in every if one != other and one in other] == []
