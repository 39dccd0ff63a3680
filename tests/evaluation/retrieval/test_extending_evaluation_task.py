"""The example of docs/extending/evaluation_task.md."""

from __future__ import annotations

from typing import Any

import pytest
from extending import code_blocks

from megatron_ext.evaluation.retrieval.haystack import read_haystack
from megatron_ext.evaluation.retrieval.samples import DoesNotFitError, SampleInputs, SampleKey, TokenSample


@pytest.mark.parametrize("length", [2, 7, 64])
def test_the_pages_task_asks_for_the_reversal(length: int) -> None:
    (code,) = code_blocks("evaluation_task.md")
    names: dict[str, Any] = {"__name__": "reversal"}
    exec(compile(code, "evaluation_task.md", "exec"), names)
    inputs = SampleInputs(lambda _: [], read_haystack(None), range(100, 200))
    sample_key = SampleKey("induction", length, None, 1, 0)
    sample = names["TASK"].sample(sample_key, inputs)
    assert isinstance(sample, TokenSample)
    assert sample == names["TASK"].sample(sample_key, inputs)
    assert len(sample.tokens) == length
    half = length // 2
    assert sample.scored == tuple(range(length - half, length))
    for back, position in enumerate(sample.scored, start=1):
        assert sample.tokens[position] == sample.tokens[length - half - back]
    with pytest.raises(DoesNotFitError):
        names["TASK"].check(SampleKey("induction", 1, None, 1, 0), inputs)
