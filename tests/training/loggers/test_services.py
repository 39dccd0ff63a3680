"""The optional loggers with the real libraries, offline: configuration, each value once, one run over a resume."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.run_folder.layout import MLFLOW
from megatron_ext.training.loggers.core import tracker
from megatron_ext.training.records import RunRecords

SETTINGS = {"training.steps": 4, "model.head_dim": None, "optimizer.betas": [0.9, 0.95], "parameters": 123}
TAGS = {"train/loss", "train/grad_norm", "train/tokens_per_second"}
DOMAIN = "validation/Web (2024)"

Values = dict[str, list[tuple[int, float]]]


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a service's library, which starts processes, however slow the machine is."""
    monkeypatch.setattr(tracker, "STOP_SECONDS", 240.0)
    monkeypatch.setattr(tracker, "CLOSE_SECONDS", 240.0)


def write(folder: Path, service: str, first: int, last: int) -> None:
    records = RunRecords(folder, "small", first, 4, backends=[service], settings=SETTINGS)
    for step in range(first + 1, last + 1):
        records.step({"step": step, "loss": 6.0 / step, "grad_norm": 1.0, "tokens_per_second": 9.0, "mfu": None})
    records.evaluation([{"step": last, "split": "validation", "domain": "Web (2024)", "loss": 8.0 / last}])
    records.close()


def train(folder: Path, service: str) -> None:
    """Log two steps, resume and log the third, then repeat the third after a loss of it and end with the fourth."""
    write(folder, service, 0, 2)
    write(folder, service, 2, 3)
    write(folder, service, 2, 4)


def check(first: Values, second: Values, domain: str = DOMAIN) -> None:
    """Compare the values of the resumed run and of the one that replaced it."""
    assert first.keys() == second.keys() == {*TAGS, domain}
    assert first["train/loss"] == [(1, 6.0), (2, 3.0), (3, 2.0)]
    assert second["train/loss"] == [(1, 6.0), (2, 3.0), (3, 2.0), (4, 1.5)]
    assert first[domain] == [(2, 4.0), (3, 8.0 / 3)]
    assert second[domain] == [(2, 4.0), (4, 2.0)]


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in ("WANDB_DIR", "WANDB_NAME", "WANDB_PROJECT", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path, "wandb")
    runs: dict[str, Values] = {}
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns):
        values = runs.setdefault(path.stem, {})
        for record in wandb_records(path.read_bytes()):
            if record.HasField("run"):
                assert (record.run.display_name, record.run.run_group, record.run.project) == (
                    *("small", "small"),
                    "selectron",
                )
                assert {"parameters", *SETTINGS} <= {item.key for item in record.run.config.update}
            elif record.HasField("history"):
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                for tag, value in row.items():
                    if tag in {*TAGS, DOMAIN}:
                        values.setdefault(tag, []).append((int(row["step"]), float(value)))
    check(*runs.values())


def wandb_records(content: bytes) -> Iterator[Any]:
    """Yield the records of a .wandb file that is shorter than a block of its LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    header, block = 7, 32768
    assert len(content) < block
    at = header  # of the file; each record has one of the same size: checksum, length, type
    while at < len(content):
        length = int.from_bytes(content[at + 4 : at + 6], "little")
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content[at + header : at + header + length])
        yield record
        at += header + length


def test_mlflow_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path, "mlflow")
    with sqlite3.connect(tmp_path / MLFLOW) as database:
        runs = database.execute("select run_uuid, name, status from runs order by start_time").fetchall()
        assert [(name, status) for _, name, status in runs] == [("small", "KILLED"), ("small", "FINISHED")]
        found: list[Values] = []
        for run, *_ in runs:
            assert dict(database.execute("select key, value from params where run_uuid = ?", (run,))) == {
                key: str(value) for key, value in SETTINGS.items()
            }
            values: Values = {}
            rows = database.execute("select key, step, value from metrics where run_uuid = ? order by step", (run,))
            for tag, step, value in rows:
                values.setdefault(tag, []).append((step, value))
            found.append(values)
    check(*found, domain="validation/Web _2024_")


def test_trackio_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Trackio reads the variable when it is first imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    train(tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "selectron.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = [text for (text,) in database.execute("select config from configs")]
    runs: dict[str, Values] = {}
    for name, step, metrics in rows:
        for tag, value in json.loads(metrics).items():
            runs.setdefault(name, {}).setdefault(tag, []).append((step, value))
    assert all(name.startswith("small-") for name in runs)
    check(*runs.values())
    assert all(SETTINGS.items() <= json.loads(text).items() for text in configs)
