"""Stragglers: ranks that are slower than the others are named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import slow_rank
from corpora import prepared
from launching import write_config

from megatron_ext.training.resilience.stragglers import RankSpeed, describe_slow_ranks


def paces(products: list[float], readings: list[float]) -> list[RankSpeed]:
    return [RankSpeed(rank, "n1", *pair) for rank, pair in enumerate(zip(products, readings, strict=True))]


def test_slow_ranks() -> None:
    assert describe_slow_ranks(paces([1.0, 1.2, 1.4], [0.0, 0.0, 0.0]), 1.5) == []
    (line,) = describe_slow_ranks(paces([0.010, 0.016, 0.010], [0.02, 0.02, 0.02]), 1.5)
    assert line == "rank 1 on n1 is slow: it took 16 ms for a matrix product, the others 10"
    (line,) = describe_slow_ranks(paces([0.01, 0.01, 0.01], [0.001, 0.001, 0.2]), 1.5)
    assert line == "rank 2 on n1 is slow: it took 200 ms for reading a step's samples, the others 1"
    assert describe_slow_ranks(paces([0.01] * 3, [0.001, 0.001, 0.008]), 1.5) == []  # too short to matter


def test_one_of_two_is_compared_with_the_other() -> None:
    assert describe_slow_ranks(paces([0.01, 0.014], [0.02, 0.02]), 1.5) == []
    (line,) = describe_slow_ranks(paces([0.01, 0.016], [0.02, 0.02]), 1.5)
    assert line == "rank 1 on n1 is slow: it took 16 ms for a matrix product, the others 10"
    assert len(describe_slow_ranks(paces([0.01, 0.4], [0.02, 0.9]), 30.0)) == 2


def test_half_of_the_ranks_slow() -> None:
    lines = describe_slow_ranks(paces([0.01, 0.02, 0.01, 0.02], [0.0] * 4), 1.5)
    assert [line.partition(" on ")[0] for line in lines] == ["rank 1", "rank 3"]


def test_one_rank_has_no_others() -> None:
    assert describe_slow_ranks(paces([0.01], [9.0]), 1.5) == []


@pytest.mark.slow
def test_slowly_reading_rank_is_reported(pool: Any, tmp_path: Path) -> None:
    config = write_config(tmp_path, prepared(tmp_path), tmp_path)
    fields = [
        "training.evaluate_every=0",
        "resilience.straggler_every=3",
        "training.steps=6",
        "model.pattern=attention",
        "resilience.straggler_factor=3",
    ]
    errors = pool.run(slow_rank.run, 2, config, fields, 0.6)
    records = [json.loads(line) for line in (tmp_path / "run" / "stragglers.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [3, 6]
    for record in records:
        *_, last = record["ranks"]
        assert [pace["rank"] for pace in record["ranks"]] == [0, 1]
        assert [pace["reading"] for pace in record["ranks"]] == pytest.approx([slow_rank.TICK, 0.6 + slow_rank.TICK])
        assert min(pace["product"] for pace in record["ranks"]) > 0
        (line,) = (line for line in record["slow"] if "samples" in line)
        took = f"it took {1e3 * last['reading']:.3g} ms for reading a step's samples, the others "
        assert line.startswith(f"rank 1 on {last['host']} is slow: {took}")
        assert f"selectron: warning: step {record['step']}: {line}\n" in errors[0]
    assert "selectron: warning" not in "".join(errors[1:])  # only the first rank prints the warning
