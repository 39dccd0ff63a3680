"""The logger of docs/extending/logger.md registers itself and keeps each step once."""

from __future__ import annotations

from pathlib import Path

from extending import code_blocks

from megatron_ext.training.loggers.core.registry import LOGGERS, load_all
from megatron_ext.training.records import RunRecords


def write(folder: Path, first: int, last: int) -> None:
    records = RunRecords(folder, "run", first, 9, backends=["csv"])
    for step in range(first + 1, last + 1):
        records.step({"step": step, "loss": 8.0 / step, "tokens_per_second": 2.0})
    records.evaluation([{"step": last, "split": "test", "domain": "Code", "loss": 1.0}])
    records.flush()
    records.rewind(last)
    records.close()


def test_logger_of_the_documentation(tmp_path: Path) -> None:
    load_all()
    (code,) = code_blocks("logger.md")
    exec(compile(code, "logger.md", "exec"), {"__name__": "logger_page"})
    try:
        write(tmp_path, 0, 4)
        write(tmp_path, 1, 2)
    finally:
        del LOGGERS["csv"]
    rows = [line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()]
    assert [(step, value) for step, tag, value in rows if tag == "train/loss"] == [("1", "8.0"), ("2", "4.0")]
    assert [row for row in rows if row[1] == "test/Code"] == [["2", "test/Code", "1.0"]]
