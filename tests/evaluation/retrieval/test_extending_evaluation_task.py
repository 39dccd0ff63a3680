"""The task of docs/extending/evaluation_task.md registers itself, and is the only change that a task needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from extending import code_blocks
from retrieval_fakes import FakeModel, Words, read

from megatron_ext.config.validate import validate
from megatron_ext.evaluation.retrieval.haystack import read_haystack
from megatron_ext.evaluation.retrieval.options import RetrievalOptions
from megatron_ext.evaluation.retrieval.registry import TASKS, load_all
from megatron_ext.evaluation.retrieval.run import evaluate_retrieval
from megatron_ext.evaluation.retrieval.samples import DoesNotFitError, SampleInputs, SampleKey, TokenSample
from megatron_ext.utils.errors import UserError


@pytest.fixture
def reversal() -> Iterator[None]:
    """Register the example for one test."""
    load_all()
    (code,) = code_blocks("evaluation_task.md")
    exec(compile(code, "evaluation_task.md", "exec"), {"__name__": "reversal"})
    yield
    del TASKS["reversal"]


@pytest.mark.usefixtures("reversal")
@pytest.mark.parametrize("length", [2, 7, 64])
def test_the_pages_task_asks_for_the_reversal(length: int) -> None:
    inputs = SampleInputs(lambda _: [], read_haystack(None), range(100, 200))
    sample_key = SampleKey("reversal", length, None, 1, 0)
    sample = TASKS["reversal"].sample(sample_key, inputs)
    assert isinstance(sample, TokenSample)
    assert sample == TASKS["reversal"].sample(sample_key, inputs)
    assert len(sample.tokens) == length
    half = length // 2
    assert sample.scored == tuple(range(length - half, length))
    for back, position in enumerate(sample.scored, start=1):
        assert sample.tokens[position] == sample.tokens[length - half - back]
    with pytest.raises(DoesNotFitError):
        TASKS["reversal"].check(SampleKey("reversal", 1, None, 1, 0), inputs)


@pytest.mark.usefixtures("reversal")
def test_a_registered_task_can_be_chosen() -> None:
    assert "reversal" in RetrievalOptions().tasks
    options = validate(RetrievalOptions, {"tasks": ["reversal"], "lengths": [64], "samples": 2}, "retrieval.")
    results = evaluate_retrieval(FakeModel(Words(), read), options)
    assert [(record.task, record.length, record.depth) for record in results.records] == [("reversal", 64, None)] * 2


def test_a_misspelt_task_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        validate(RetrievalOptions, {"tasks": ["vt", "reversl", "pass_key"]}, "retrieval.")
    assert str(caught.value).startswith('retrieval.tasks.1: "reversl" is not one of the choices; known: ')
    assert "retrieval.tasks.2" in str(caught.value)
    with pytest.raises(UserError, match=r'^retrieval\.tasks\.0: "pass_key" is not one .*; did you mean passkey\?$'):
        validate(RetrievalOptions, {"tasks": ["pass_key"]}, "retrieval.")
