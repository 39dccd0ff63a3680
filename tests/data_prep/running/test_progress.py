"""Progress of tasks, from handmade boards, and the output of `selectron prepare` for a small corpus."""

import re
from pathlib import Path

import numpy as np
import pytest
from prep_fakes import options

from data_prep.prepare import prepare
from data_prep.running import execution
from data_prep.running.execution import Stage, progress_text
from data_prep.running.progress import Progress, ProgressBoard

NOW = 1_000_000.0


def board_of(path: Path, rows: list[tuple[int, int, float]]) -> ProgressBoard:
    """Write a board with bytes, tokens and start time of each task. A start of 0 means that the task is pending."""
    board = ProgressBoard(path, len(rows))
    counts = [number for read, tokens, _ in rows for number in (read, tokens)]
    start_times = [round(1000 * start) for _, _, start in rows]
    np.array([*counts, *start_times], np.int64).tofile(path)
    return board


def test_progress_by_hand(tmp_path: Path) -> None:
    rows = [
        (1000, 300, NOW - 500),  # finished
        (400, 100, NOW - 40),
        (600, 240, NOW - 20),
        (0, 0, 0),
    ]
    board = board_of(tmp_path / "board", rows)
    assert board.sums() == (2000, 640)
    progress = board.progress({0}, NOW)
    assert progress == Progress(read=2000, tokens=640, num_running=2, read_speed=10 + 30, token_speed=2.5 + 12)
    assert progress.describe(8000) == "25 % of 8.00kB read, 40.0B/s, 14.5 tokens/s, 02:30 left in this stage"
    assert board.progress({0, 1, 2}, NOW).describe(8000) == "25 % of 8.00kB read, no running task"


def test_progress_without_speed(tmp_path: Path) -> None:
    nothing_yet = board_of(tmp_path / "board", [(0, 0, NOW + 3)])  # a start in the future, by another machine's clock
    assert nothing_yet.progress((), NOW) == Progress(0, 0, 1, 0.0, 0.0)
    assert nothing_yet.progress((), NOW).describe(100) == "0 % of 100B read, 0.00B/s"
    assert Progress(50, 0, 1, 0.5, 0.0).describe(7300) == "1 % of 7.30kB read, 0.50B/s, 4:01:40 left in this stage"
    assert Progress(0, 0, 0, 0.0, 0.0).describe(0) == "0 % of 0.00B read, no running task"


def test_restarted_task_begins_at_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = board_of(tmp_path / "board", [(7, 3, 5.0), (70, 30, 5.0)])
    monkeypatch.setattr("data_prep.running.progress.time.time", lambda: NOW)
    read, tokens = board.byte_counter(1), board.token_counter(1)
    assert board.sums() == (7, 3)
    read[0] += 20
    tokens[0] += 8
    assert board.sums() == (27, 11)
    assert board.progress({0}, NOW + 4) == Progress(27, 11, 1, 5.0, 2.0)


def test_board_without_start_times_is_extended(tmp_path: Path) -> None:
    board = ProgressBoard(tmp_path / "board", 2)
    np.array([7, 3, 70, 30], np.int64).tofile(board.path)
    board.create()
    assert board.sums() == (77, 33)
    assert board.progress({0}, NOW).num_running == 0
    content = board.path.read_bytes()
    assert len(content) == 48
    board.create()
    assert board.path.read_bytes() == content


def test_only_stages_that_read_the_input_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".work").mkdir()
    monkeypatch.setattr(execution.time, "time", lambda: NOW)
    stages = [
        Stage("first", [], 1, board_of(tmp_path / "first", [(500, 0, NOW - 90)])),
        Stage("sorting", [], 2),
        Stage("second", [], 2, board_of(tmp_path / "second", [(300, 60, NOW - 30), (0, 0, 0)])),
        Stage("sweeping", [], 1),
    ]
    messages = [progress_text(stages, tmp_path, 500)]
    for stage in stages:
        finished = Path(stage.log_folder(tmp_path)) / "completions"
        finished.mkdir(parents=True)
        for task in range(stage.tasks):
            (finished / f"{task:05d}").touch()
        messages.append(progress_text(stages, tmp_path, 500))
    assert messages == [
        "at stage 1/2 first: 100 % of 500B read, 5.56B/s, 00:00 left in this stage",
        "at sorting, before 2/2 second",
        "at stage 2/2 second: 60 % of 500B read, 10.0B/s, 2.00 tokens/s, 00:20 left in this stage",
        "at sweeping, before the end",
        "at merging, after all stages",
    ]


def test_progress_output_of_a_preparation(
    records: Path, tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, progress=True))
    assert manifest is not None
    bars = {line.split(":")[0]: line for line in re.split(r"[\r\n]+", capsys.readouterr().err) if line.strip()}
    assert list(bars) == ["1/4 exact_signatures", "2/4 search_train", "3/4 judge_test", "4/4 tokenising"]
    for last in bars.values():
        assert ": 100%|" in last
        assert "B/s" in last
    tokens = sum(entry.tokens for entry in manifest.domains)
    assert f"{tokens / 1000:.2f}k tokens, " in bars["4/4 tokenising"]
    assert bars["4/4 tokenising"].rstrip(" ]").endswith("tokens/s")
    assert all("tokens" not in bars[title] for title in list(bars)[:3])
