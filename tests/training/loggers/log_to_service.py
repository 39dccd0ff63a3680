"""Program that logs a run and its resumes to a tracking service, offline: log_to_service.py SERVICE FOLDER.

The services are imported in a process of their own, since whatever imports DeepSpeed or megatron-core where wandb or
mlflow can be found imports these, too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ext.training.loggers.core import tracker
from megatron_ext.training.records import RunRecords

SETTINGS = {"training.steps": 4, "model.head_dim": None, "optimizer.betas": [0.9, 0.95], "parameters": 123}

PACKAGES = Path(sys.prefix) / "loggers"
"""Folder of tools/install_loggers.sh."""

WANDB_RECORDS = "wandb_records.json"
"""File for the records of the W&B runs in the order of their files: {file: [record]}. Reading them takes W&B."""


def train(folder: Path, service: str) -> None:
    """Log two steps, resume and log the third, then repeat the third after a loss of it and end with the fourth."""
    _write(folder, service, 0, 2)
    _write(folder, service, 2, 3)
    _write(folder, service, 2, 4)


def _write(folder: Path, service: str, first: int, last: int) -> None:
    records = RunRecords(folder, "small", first, 4, backends=[service], settings=SETTINGS)
    for step in range(first + 1, last + 1):
        records.step({"step": step, "loss": 6.0 / step, "grad_norm": 1.0, "tokens_per_second": 9.0, "mfu": None})
    records.evaluation([{"step": last, "split": "validation", "domain": "Web (2024)", "loss": 8.0 / last}])
    records.close()


def write_wandb_records(folder: Path) -> None:
    """Convert the .wandb files of a run folder to WANDB_RECORDS."""
    from google.protobuf.json_format import MessageToDict

    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    found: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        records = (MessageToDict(record, preserving_proto_field_name=True) for record in read_wandb(file.read_bytes()))
        found.setdefault(file.stem, []).extend(records)
    (folder / WANDB_RECORDS).write_text(json.dumps(found))


def read_wandb(content: bytes) -> Iterator[Any]:
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


def main(service: str, folder: Path) -> None:
    """Log to the service; see `train`."""
    # Last, so that packages of the environment come before these.
    sys.path.append(str(PACKAGES))
    # Wait for the libraries however slow the machine is. The first use of MLflow compiles hundreds of modules.
    tracker.STOP_SECONDS = tracker.CLOSE_SECONDS = 240.0
    train(folder, service)
    if service == "wandb":
        write_wandb_records(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
