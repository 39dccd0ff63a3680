"""Few-shot results through a model that only scores and generates, compared with lm-eval's Hugging Face model."""

from __future__ import annotations

import inspect
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_evals import DEFINITIONS, definitions, lm_evals_numbers, our_numbers, same
from questions import write_questions
from small_model import MAX_LENGTH, PlainModel, lm_evals_own, small_llama, small_tokenizer

from megatron_ext.evaluation.fewshot import adapter, run
from megatron_ext.evaluation.fewshot.adapter import SelectronLM
from megatron_ext.evaluation.fewshot.options import FewshotOptions
from megatron_ext.evaluation.fewshot.run import evaluate_fewshot

OWN_TASKS = {
    "whole_texts": """
task: whole_texts
output_type: loglikelihood_rolling
test_split: train
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
    "last_words": """
task: last_words
output_type: loglikelihood
test_split: train
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
metric_list: [{metric: perplexity, aggregation: perplexity}, {metric: acc, aggregation: mean}]
""",
    "going_on": """
task: going_on
output_type: generate_until
test_split: train
doc_to_text: "{{text}}"
doc_to_target: "{{text[:1]}}"
generation_kwargs: {until: ["e", " t"], max_gen_toks: 20}
metric_list: [{metric: exact_match, aggregation: mean}]
""",
}


def texts() -> list[str]:
    """Return texts from two words to several times the model's maximum length."""
    dice = random.Random(5)
    words = ["kettle", "rolls", "naïve", "under", "the", "ladder,", "often"]
    return [" ".join(dice.choices(words, k=length)) for length in (2, 3, 8, 21, 60, 150, 400)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with test sets as published, the same rows in the hub's columns, and the user's own task definitions."""
    folder = tmp_path_factory.mktemp("fewshot")
    write_questions(folder / "published", folder / "columns")
    (folder / "own").mkdir()
    for name, definition in OWN_TASKS.items():
        source = f"dataset_path: text\ndataset_kwargs: {{data_files: {folder}/texts.txt, cache_dir: {folder}/cache}}\n"
        (folder / "own" / f"{name}.yaml").write_text(source + definition)
    (folder / "texts.txt").write_text("\n".join(texts()))
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[PlainModel, Any]:
    """Return the same model as a `TextModel` and as lm-eval's Hugging Face model."""
    tokenizer = small_tokenizer([path.read_text() for path in sorted((folder / "columns").rglob("*.jsonl"))])
    model = small_llama(tokenizer.get_vocab_size())
    return PlainModel(model, tokenizer), lm_evals_own(model, tokenizer)


@pytest.mark.parametrize("shots", [0, 2])
def test_seven_tasks_are_lm_evals_own(shots: int, both: tuple[PlainModel, Any], folder: Path) -> None:
    model, own = both
    results = evaluate_fewshot(model, FewshotOptions(data=folder / "published", num_fewshot=shots))
    theirs = lm_evals_numbers(own, list(DEFINITIONS), definitions(folder), num_fewshot=shots)
    same(our_numbers(results), theirs)
    assert results is not None
    assert 0 < results.truncated < results.asked
    accuracies = {task: theirs[task, "acc", "none"] for task in DEFINITIONS}
    assert len(set(accuracies.values())) > 2, "or any numbers would do"
    assert [task.num_fewshot for task in results.tasks] == [shots] * 7
    splits = {task.name: set(task.sources) - ({"train"} if shots else set()) for task in results.tasks}
    assert splits["arc_easy"] == splits["openbookqa"] == {"test"}
    assert splits["piqa"] == splits["boolq"] == {"validation"}


def test_validation_rows_can_be_all_there_is(both: tuple[PlainModel, Any], folder: Path) -> None:
    """Few-shot examples come from the evaluated split, but never include the question itself. The seed selects them."""
    model, own = both
    shared_options = {"num_fewshot": 2, "limit": 4}
    include = definitions(folder, training_split="null", test_split="validation", fewshot_split="validation")
    found = {}
    for seed in (1234, 7):
        options = FewshotOptions(data=folder / "published", split="validation", seed=seed, **shared_options)
        model.asked.clear()
        results = evaluate_fewshot(model, options)
        same(
            our_numbers(results),
            lm_evals_numbers(own, list(DEFINITIONS), include, fewshot_random_seed=seed, **shared_options),
        )
        assert results is not None
        assert {(task.rows, task.rows_there, *task.sources) for task in results.tasks} == {(4, 6, "validation")}
        found[seed] = str(model.asked)
    assert found[1234] != found[7]


def test_tasks_of_the_users_own(both: tuple[PlainModel, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perplexities of overlong texts and of last words (with a bootstrapped standard error), and generation."""
    model, own = both
    assert inspect.signature(simple_evaluate).parameters["bootstrap_iters"].default == run.BOOTSTRAP_ITERATIONS
    monkeypatch.setattr(run, "BOOTSTRAP_ITERATIONS", iterations := 2000)  # the default number takes seconds
    results = evaluate_fewshot(model, FewshotOptions(tasks=tuple(OWN_TASKS), include_path=folder / "own"))
    theirs = lm_evals_numbers(own, list(OWN_TASKS), folder / "own", bootstrap_iters=iterations)
    same(our_numbers(results), theirs)
    assert theirs["last_words", "perplexity_stderr", "none"] > 0


def requests(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, args, 0, ("task", 0, 1)) for args in arguments]


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("the kettle", " rolls"),
        ("the kettle ", "rolls"),  # the space moves to the continuation
        ("the kettle \n ", "rolls under"),
        ("", "the kettle"),
        ("", "k"),
        ("under " * 300, "the ladder"),
        ("the", " under" * 60),
    ],
)
def test_texts_are_cut_into_tokens_alike(context: str, continuation: str, both: tuple[PlainModel, Any]) -> None:
    model, own = both
    instances = requests("loglikelihood", [(context, continuation)])
    assert SelectronLM(model).loglikelihood(instances) == own.loglikelihood(instances)


def test_whole_texts_are_read_window_by_window(both: tuple[PlainModel, Any]) -> None:
    model, own = both
    instances = requests("loglikelihood_rolling", [(text,) for text in [*texts(), ""]])
    model.asked.clear()
    assert SelectronLM(model).loglikelihood_rolling(instances) == own.loglikelihood_rolling(instances)
    assert max(len(request.context) + len(request.continuation) for (request, *_) in model.asked) == MAX_LENGTH + 1


def test_the_likeliest_tokens_are_known_as_such(both: tuple[PlainModel, Any]) -> None:
    """A greedy continuation is reported as greedy. With any token replaced it is not."""
    model, own = both
    context = model.encode("the kettle rolls")
    (likeliest,) = model.generate([context], 6, lambda _: False)
    others = [[*likeliest[:place], 7, *likeliest[place + 1 :]] for place in range(6)]
    instances = [(("", str(tokens)), context, tokens) for tokens in [likeliest, *others]]
    found = SelectronLM(model)._loglikelihood_tokens(instances)
    assert [is_greedy for _, is_greedy in found] == [True] + [False] * 6
    assert found == own._loglikelihood_tokens(instances)


def generation(until: Any, max_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    return [(text, {"until": until, "max_gen_toks": max_tokens}) for text in texts()[::2]]


def test_generated_texts_are_the_same(both: tuple[PlainModel, Any]) -> None:
    """Long prompts are truncated to leave room for the generated text."""
    model, own = both
    instances = requests("generate_until", generation([], 1) + generation("e", 100) + generation(["\n\n"], 12))
    assert SelectronLM(model).generate_until(instances) == own.generate_until(instances)


@pytest.mark.parametrize("num_beams", [2, 5])
def test_texts_that_beams_find_are_the_same(num_beams: int, both: tuple[PlainModel, Any]) -> None:
    model, own = both
    plain = generation([], 1) + generation("e", 60) + generation(["\n\n", " t"], 12)
    instances = requests("generate_until", [(text, more | {"num_beams": num_beams}) for text, more in plain])
    found = SelectronLM(model).generate_until(instances)
    assert found == own.generate_until(instances)
    assert found != SelectronLM(model).generate_until(requests("generate_until", plain))


def test_the_only_token_that_may_be_drawn_is_that_of_lm_evals_model(both: tuple[PlainModel, Any]) -> None:
    model, own = both
    shape = {"do_sample": True, "temperature": 0.9, "top_k": 1}
    instances = requests("generate_until", [(text, more | shape) for text, more in generation("e", 30)])
    model.asked.clear()
    assert SelectronLM(model).generate_until(instances) == own.generate_until(instances)
    assert all(len(set(draws)) == len(draws) > 0 for _, _, draws in model.asked)


@pytest.mark.parametrize("top_k", [None, 3])
def test_tokens_are_drawn_as_often_as_by_lm_evals_model(top_k: int | None, both: tuple[PlainModel, Any]) -> None:
    """Draw the first token 1,500 times with each model.

    The counts agree within four standard errors of the difference.
    """
    model, own = both
    own = HFLM(pretrained=own.model, tokenizer=own.tokenizer, batch_size=100)  # the same model in fewer passes
    times, more = 1500, {"until": [], "max_gen_toks": 1, "do_sample": True, "temperature": 0.8}
    instances = requests("generate_until", [(texts()[1], more if top_k is None else more | {"top_k": top_k})] * times)
    torch.manual_seed(6)
    ours, theirs = (Counter(lm.generate_until(instances, disable_tqdm=True)) for lm in (SelectronLM(model, 3), own))
    assert set(ours) == set(theirs)
    assert len(ours) > (1 if top_k else 20)
    for token in ours | theirs:
        share = (ours[token] + theirs[token]) / (2 * times)
        assert abs(ours[token] - theirs[token]) <= 4 * math.sqrt(2 * times * share * (1 - share)) + 1


def test_a_seed_draws_the_same_and_a_text_asked_twice_differently(
    both: tuple[PlainModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = both
    monkeypatch.setattr(adapter, "BATCH_SIZE", 16)
    more = {"until": [], "max_gen_toks": 8, "temperature": 1.0}  # samples by default, because do_sample is not given
    instances = requests("generate_until", [(texts()[2], more)] * 40)  # more than two batches
    first, again, other = (SelectronLM(model, seed).generate_until(instances, True) for seed in (1, 1, 2))
    assert first == again
    assert len(set(first)) > 38
    assert sum(one == two for one, two in zip(first, other, strict=True)) < 3


def test_texts_end_before_what_ends_them(both: tuple[PlainModel, Any]) -> None:
    """A stop string may be part of a token or span several tokens. The earliest of several stop strings applies."""
    model, own = both
    free = SelectronLM(model).generate_until(requests("generate_until", generation([], 40)))
    pairs, expected = [], []
    for whole, (text, arguments) in zip(free, generation([], 40), strict=True):
        for until in ([whole[10]], [whole[12:17]], [whole[20:23], whole[6:9]], ["never there", whole[15:17]]):
            pairs.append((text, arguments | {"until": until}))
            expected.append(whole[: min(whole.find(stop) for stop in until if stop in whole)])
    instances = requests("generate_until", pairs)
    assert SelectronLM(model).generate_until(instances) == own.generate_until(instances) == expected


def test_the_end_of_a_document_ends_a_text(both: tuple[PlainModel, Any]) -> None:
    """The modified model sooner or later generates the end-of-document token."""
    model, own = both
    instances = requests("generate_until", [(text, {"until": [], "max_gen_toks": 30}) for text in texts()])
    free = SelectronLM(model).generate_until(instances)
    end_row = own.model.lm_head.weight[model.end_id]
    kept = end_row.clone()
    with torch.no_grad():
        end_row.copy_(1.5 * own.model.lm_head.weight[model.encode(free[-1])[2]])
    try:
        ended = SelectronLM(model).generate_until(instances)
        assert ended == own.generate_until(instances)
        assert ended != free
    finally:
        with torch.no_grad():
            end_row.copy_(kept)
