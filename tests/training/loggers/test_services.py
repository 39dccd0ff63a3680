"""The optional loggers with the real libraries, offline: configuration, each value once, one run over a resume."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

import log_to_service
import pytest
from log_to_service import PACKAGES, SETTINGS, WANDB_RECORDS
from required import unless_required

from megatron_ext.run_folder.layout import MLFLOW

ROOT = Path(__file__).resolve().parents[3]
TAGS = {"train/loss", "train/grad_norm", "train/tokens_per_second"}
DOMAIN = "validation/Web (2024)"

Values = dict[str, list[tuple[int, float]]]


def log(service: str, folder: Path, **variables: str) -> None:
    """Log a run and its resumes to a service in a process of its own; skip the test if a package is missing.

    Raises:
        RuntimeError: a package is missing, and SELECTRON_REQUIRED names `loggers`.
    """
    packages = ("mlflow", "alembic") if service == "mlflow" else (service,)
    absent = [name for name in packages if PathFinder.find_spec(name, [*sys.path, str(PACKAGES)]) is None]
    reason = f"not installed: {', '.join(absent)}; tools/install_loggers.sh installs it" if absent else ""
    if unless_required("loggers", reason):
        pytest.skip(reason)
    kept = {key: text for key, text in os.environ.items() if not key.startswith(("WANDB_", "MLFLOW_", "TRACKIO_"))}
    done = subprocess.run(
        [sys.executable, log_to_service.__file__, service, str(folder)],
        env=kept | variables | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "selectron: warning" not in done.stderr, done.stderr


def check(runs: Iterable[Values], domain: str = DOMAIN) -> None:
    """Compare the values of the resumed run and of the one that replaced it."""
    first, second = runs
    assert first.keys() == second.keys() == {*TAGS, domain}
    assert first["train/loss"] == [(1, 6.0), (2, 3.0), (3, 2.0)]
    assert second["train/loss"] == [(1, 6.0), (2, 3.0), (3, 2.0), (4, 1.5)]
    assert first[domain] == [(2, 4.0), (3, 8.0 / 3)]
    assert second[domain] == [(2, 4.0), (4, 2.0)]


def test_wandb_offline(tmp_path: Path) -> None:
    log("wandb", tmp_path, WANDB_MODE="offline", WANDB_ERROR_REPORTING="false")
    runs: list[Values] = []
    for records in json.loads((tmp_path / WANDB_RECORDS).read_text()).values():
        values: Values = {}
        runs.append(values)
        for record in records:
            if "run" in record:
                run = record["run"]
                assert (run["display_name"], run["run_group"], run["project"]) == ("small", "small", "selectron")
                assert {"parameters", *SETTINGS} <= {item["key"] for item in run["config"]["update"]}
            elif "history" in record:
                items = record["history"]["item"]
                row = {item.get("key") or "/".join(item["nested_key"]): item["value_json"] for item in items}
                for tag, value in row.items():
                    if tag in {*TAGS, DOMAIN}:
                        values.setdefault(tag, []).append((int(row["step"]), float(value)))
    check(runs)


def test_mlflow_in_a_file(tmp_path: Path) -> None:
    log("mlflow", tmp_path, MLFLOW_DISABLE_TELEMETRY="true")
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
    check(found, domain="validation/Web _2024_")


def test_trackio_in_a_folder(tmp_path: Path) -> None:
    log("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "selectron.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
        configs = [text for (text,) in database.execute("select config from configs")]
    runs: dict[str, Values] = {}
    for name, step, metrics in rows:
        for tag, value in json.loads(metrics).items():
            runs.setdefault(name, {}).setdefault(tag, []).append((step, value))
    assert all(name.startswith("small-") for name in runs)
    check(runs.values())
    assert all(SETTINGS.items() <= json.loads(text).items() for text in configs)
