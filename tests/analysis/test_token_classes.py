"""Reader of recorded losses by class of token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.analysis.token_classes import loss, read_class_losses, read_evaluated_class_losses
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.ratio_interval import ratio_variance


def _record(step: int, domain: str, **classes: tuple[list[float], list[int]]) -> dict[str, Any]:
    names = {"early": "score/50", "late": "score/2000", "seen": "token/seen"}
    fields = {
        names[name]: {"document_loss": nats, "document_tokens": tokens} for name, (nats, tokens) in classes.items()
    }
    record = {"step": step, "domain": domain, "split": "test", "documents": [3, 1, 8], "tokens": 5, "loss": 1.0}
    return record | ({"classes": fields} if fields else {})


SEEN = ([2.5, 0.0, 4.0], [2, 0, 3])


def test_losses_by_step_domain_class_and_document(tmp_path: Path) -> None:
    first = _record(4, "code", seen=([9.0, 9.0, 9.0], [9, 9, 9]))
    lines = [_record(2, "web"), first, _record(4, "web", seen=SEEN), _record(4, "code", seen=SEEN)]
    (tmp_path / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = read_class_losses(tmp_path)
    assert [(one.step, one.split, one.domain) for one in found] == [(4, "test", "code"), (4, "test", "web")]
    for one in found:  # of the repeated evaluation of code, the second counts
        assert (one.names, one.documents.tolist()) == (("token/seen",), [1, 3, 8])
        tokens, nats = one.of("token/seen")
        assert (tokens.tolist(), nats.tolist()) == ([0, 2, 3], [0.0, 2.5, 4.0])
        assert loss(tokens, nats) == 6.5 / 5
        assert np.isnan(loss(*one.of("text/digits")))
        assert one.in_context_score() is None


def test_newest_results_of_the_suite(tmp_path: Path) -> None:
    assert read_evaluated_class_losses(tmp_path) == []
    for step in (9, 10):
        folder = tmp_path / "evaluation" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "token_classes.json").write_text(json.dumps({"records": [_record(step, "web", seen=SEEN)]}))
    assert [one.step for one in read_evaluated_class_losses(tmp_path)] == [10]
    assert [one.step for one in read_evaluated_class_losses(tmp_path, 9)] == [9]
    assert read_evaluated_class_losses(tmp_path, 8) == []


def test_in_context_score_weights_documents_by_their_windows(tmp_path: Path) -> None:
    early = ([55.0, 30.0, 0.0, 20.0], [22, 11, 0, 11])
    late = ([291.0, 140.0, 0.0, 91.0], [194, 70, 0, 91])
    record = _record(1, "web", early=early, late=late) | {"documents": [1, 2, 3, 4]}
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(record) + "\n")
    (found,) = read_class_losses(tmp_path)
    score = found.in_context_score()
    assert score is not None
    by_document = [291 / 194 - 55 / 22, 140 / 70 - 30 / 11, 91 / 91 - 20 / 11]
    assert score[0] == pytest.approx(np.average(by_document, weights=[22, 11, 11]))
    weights = np.array([22.0, 11.0, 11.0])
    assert score[1].variance == pytest.approx(ratio_variance(weights * by_document, weights).variance)


def test_lists_of_unequal_length_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "evaluation.jsonl").write_text(json.dumps(_record(1, "web", seen=([1.0], [1]))) + "\n")
    problem = "documents, document_loss and document_tokens of a class differ in length; restore the file"
    with pytest.raises(UserError, match=rf"evaluation.jsonl:1: {problem}"):
        read_class_losses(tmp_path)
    folder = tmp_path / "evaluation" / "step_1"
    folder.mkdir(parents=True)
    (folder / "token_classes.json").write_text("{}")
    with pytest.raises(UserError, match=r"step_1/token_classes.json: cannot be read; restore the file"):
        read_evaluated_class_losses(tmp_path)
