"""Records of a run: complete lines, each step once, equal values in TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_ext.run_folder.layout import EVALUATION, METRICS, TENSORBOARD
from megatron_ext.training.records import RunRecords
from megatron_ext.utils.errors import UserError


def metrics(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step,
        "tokens": 256 * step,
        "loss": 5.0 / step,
        "grad_norm": 1.0 + step,
        "lr": 1e-3 * step,
        "tokens_per_second": 1000.0,
        "mfu": None,
        "peak_memory": 12345,
    }
    return {**values, **changes}


def evaluation(step: int) -> list[dict[str, Any]]:
    domains = [("Web", "validation", 3.0), ("Code", "test", 4.0)]
    return [{"step": step, "domain": name, "split": split, "loss": loss / step} for name, split, loss in domains]


def write(folder: Path, first_step: int, last_step: int, **changes: Any) -> None:
    records = RunRecords(folder, "run", first_step, 10)
    for step in range(first_step + 1, last_step + 1):
        records.step(metrics(step, **changes))
        if step % 2 == 0:
            records.evaluation(evaluation(step))
    records.close()


def lines(folder: Path, name: str = METRICS) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_records_are_written_unchanged(tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    assert lines(tmp_path) == [metrics(step) for step in range(1, 5)]
    assert lines(tmp_path, EVALUATION) == evaluation(2) + evaluation(4)


def test_record_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    records = RunRecords(tmp_path, "run", 0, 10)
    records.step(metrics(1))
    assert lines(tmp_path) == [metrics(1)]
    records.close()


def test_repeated_steps_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, 6)
    write(tmp_path, 3, 5, loss=9.0)
    assert [r["step"] for r in lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert [r["loss"] == 9.0 for r in lines(tmp_path)] == [False, False, False, True, True]
    assert [r["step"] for r in lines(tmp_path, EVALUATION)] == [2, 2, 4, 4]


@pytest.mark.parametrize("cut", [1, 12, 40])
def test_incomplete_line_is_dropped(tmp_path: Path, cut: int) -> None:
    write(tmp_path, 0, 3)
    content = (tmp_path / METRICS).read_bytes()
    (tmp_path / METRICS).write_bytes(content[:-cut])  # a truncated line may end anywhere
    write(tmp_path, 2, 4)
    assert lines(tmp_path) == [metrics(step) for step in range(1, 5)]


@pytest.mark.parametrize("kept", [1, 2, 5, 9])
def test_line_with_few_written_bytes_is_dropped(tmp_path: Path, kept: int) -> None:
    write(tmp_path, 0, 2)
    with (tmp_path / METRICS).open("a") as file:
        file.write(json.dumps(metrics(3))[:kept])
    write(tmp_path, 2, 4)
    assert lines(tmp_path) == [metrics(step) for step in range(1, 5)]


def test_invalid_record_is_named_and_kept(tmp_path: Path) -> None:
    write(tmp_path, 0, 2)
    content = "edited by hand\n" + (tmp_path / METRICS).read_text()
    (tmp_path / METRICS).write_text(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl: has a line that is not a record: 'edited by hand'"):
        RunRecords(tmp_path, "run", 2, 10)
    assert (tmp_path / METRICS).read_text() == content


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder / TENSORBOARD))
    events.Reload()
    return {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_same_values(tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    found = scalars(tmp_path)
    fields = ("tokens", "loss", "grad_norm", "lr", "tokens_per_second", "peak_memory")
    assert found.keys() == {f"train/{field}" for field in fields} | {"validation/Web", "test/Code"}
    for field in fields:
        assert found[f"train/{field}"] == pytest.approx({s: metrics(s)[field] for s in range(1, 5)}, rel=1e-6)
    assert found["validation/Web"] == pytest.approx({2: 1.5, 4: 0.75})
    assert found["test/Code"] == pytest.approx({2: 2.0, 4: 1.0})


def test_tensorboard_shows_a_repeated_step_once(tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    write(tmp_path, 2, 3, loss=9.0)
    assert scalars(tmp_path)["train/loss"] == pytest.approx({1: 5.0, 2: 2.5, 3: 9.0})
