"""Table and file of the losses by class of token."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.analysis.token_classes import read_classes_file
from megatron_ext.evaluation.token_classes.results import SCORE, summarize, write_classes
from megatron_ext.utils.ratio_interval import ratio_interval

SEEN = {"document_loss": [4.0, 0.0, 9.0, 8.0], "document_tokens": [2, 0, 3, 4]}
EARLY = {"document_loss": [30.0, 0.0, 44.0, 55.0], "document_tokens": [11, 0, 11, 22]}
LATE = {"document_loss": [97.0, 0.0, 200.0, 260.0], "document_tokens": [97, 0, 97, 194]}


def _record(domain: str, **classes: dict[str, list[float]]) -> dict[str, object]:
    names = {"seen": "token/seen", "early": "score/50", "late": "score/2000"}
    record = {"step": 3, "tokens": 9, "domain": domain, "split": "test", "num_tokens": 900, "documents": [0, 1, 2, 5]}
    return record | {"classes": {names[name]: sums for name, sums in classes.items()}}


def test_losses_shares_and_intervals() -> None:
    found = summarize([_record("web", seen=SEEN, early=EARLY, late=LATE)], 0.9)
    seen, _, _, score = found
    assert (seen.name, seen.documents, seen.tokens, seen.share, seen.loss) == ("token/seen", 3, 9, 0.01, 21 / 9)
    assert seen.interval == ratio_interval(np.array([4.0, 9, 8]), np.array([2.0, 3, 4]), 0.9)
    assert (score.name, score.documents, score.tokens) == (SCORE, 3, 44 + 388)
    differences = [97 / 97 - 30 / 11, 200 / 97 - 44 / 11, 260 / 194 - 55 / 22]
    assert score.loss == pytest.approx(np.average(differences, weights=[1, 1, 2]))
    assert score.interval is not None
    assert score.interval[0] < score.loss < score.interval[1]


def test_files(tmp_path: Path) -> None:
    records = [_record("web", seen=SEEN), _record("code", seen=SEEN, early=EARLY, late=LATE)]
    table = write_classes(records, 0.9, {"run": "a", "step": 3}, tmp_path)
    assert (tmp_path / "token_classes.md").read_text() == table
    assert "| token/seen | 2.3333 (1 %) | 2.3333 (1 %) |\n" in table
    assert "| class of token | web (test) | code (test) |\n" in table
    assert "| score/50 |  | 2.9318 (4.9 %) |\n" in table
    numbers = json.loads((tmp_path / "token_classes.json").read_text())
    assert (numbers["run"], numbers["confidence"], len(numbers["losses"])) == ("a", 0.9, 5)
    code, web = read_classes_file(tmp_path / "token_classes.json")
    assert (code.domain, len(code.names), web.domain, web.names) == ("code", 3, "web", ("token/seen",))
