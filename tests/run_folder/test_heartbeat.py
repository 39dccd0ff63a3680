"""Heartbeats: written by a rank, and read from all ranks."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from pathlib import Path

import pytest

from megatron_ext.launch.ranks import ranks_table
from megatron_ext.run_folder.heartbeat import (
    FOLDER,
    Heartbeat,
    HeartbeatRecord,
    describe_stalled_ranks,
    read_heartbeats,
    remove_heartbeats,
)
from megatron_ext.utils.errors import UserError

GOING = HeartbeatRecord(
    rank=0, host="n1", pid=7, seconds=10, step=4, passes=30, further=995.0, written=998.0, ended=False
)
WAITING = dataclasses.replace(GOING, further=900.0)


def test_heartbeat_records_progress(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=3, seconds=0.02)
    heartbeat.step = 12
    for _ in range(5):
        heartbeat.beat()
    deadline = time.monotonic() + 120
    while [sign.passes for sign in read_heartbeats(tmp_path)] != [5]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (sign,) = read_heartbeats(tmp_path)
    assert (sign.rank, sign.host, sign.pid, sign.step, sign.passes) == (3, socket.gethostname(), os.getpid(), 12, 5)
    assert not sign.ended
    assert sign.further <= sign.written <= time.time()
    heartbeat.beat()
    heartbeat.close()
    (sign,) = read_heartbeats(tmp_path)
    assert (sign.passes, sign.ended) == (6, True)
    remove_heartbeats(tmp_path)
    assert read_heartbeats(tmp_path) == []


def test_no_heartbeat_if_disabled(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, rank=0, seconds=0)
    heartbeat.beat()
    heartbeat.close()
    assert list(tmp_path.iterdir()) == []


def test_unwritable_heartbeat_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("no folder")
    heartbeat = Heartbeat(tmp_path, rank=0, seconds=0.02)
    time.sleep(0.1)
    heartbeat.close()


def test_progressing_and_ended_ranks_are_not_reported() -> None:
    ended = dataclasses.replace(GOING, rank=1, written=10.0, ended=True)
    assert describe_stalled_ranks([GOING, ended], now=1000.0) == []


def test_rank_without_heartbeats_is_named() -> None:
    gone = dataclasses.replace(WAITING, rank=1, host="n2", written=950.0)
    (line,) = describe_stalled_ranks([WAITING, gone], now=1000.0)
    assert (
        line == "rank 1 on n2 wrote no heartbeat for 50 s: its process or machine has failed, stopped or is unreachable"
    )


def test_hanging_rank_is_reported_as_behind() -> None:
    hangs = dataclasses.replace(WAITING, rank=2, host="n2", passes=29)
    found = [WAITING, dataclasses.replace(WAITING, rank=1), hangs]
    assert describe_stalled_ranks(found, now=1000.0) == [
        "rank 2 on n2 is behind: 29 passes, while the median rank made 30"
    ]


def test_a_table_of_ranks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no heartbeats: no rank has started training"):
        ranks_table(tmp_path)
    heartbeats = [Heartbeat(tmp_path, rank, seconds=60) for rank in (1, 0)]
    for heartbeat in heartbeats:
        heartbeat.close()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ranks_table(tmp_path)[2:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("0", socket.gethostname(), "ended"),
        ("1", socket.gethostname(), "ended"),
    ]
