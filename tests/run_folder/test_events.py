"""Reading of the events that a job's script recorded."""

from pathlib import Path

import pytest

from megatron_ext.run_folder.launch_events import Event, launch_folders, read_events
from megatron_ext.utils.errors import UserError


def test_jobs_are_sorted_by_number(tmp_path: Path) -> None:
    assert launch_folders(tmp_path) == []
    for name in ("10", "9", "lock"):
        (tmp_path / "launch" / name).mkdir(parents=True)
    assert [path.name for path in launch_folders(tmp_path)] == ["9", "10"]


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    lines = "2026-01-01T00:00:00Z\t7\t0\tbegun on n1\n2026-01-01T01:00:00Z\t7\t2\trefused: a\tb\n2026"
    (tmp_path / "events.tsv").write_text(lines)
    first, second = read_events(tmp_path)
    assert first == Event("2026-01-01T00:00:00Z", 0, "begun on n1")
    assert second == Event("2026-01-01T01:00:00Z", 2, "refused: a\tb")
    assert (first.is_start, second.is_start) == (True, False)


@pytest.mark.parametrize(
    "line", [b"", b"x", b"2026\t7\tmany\tbegun", b"2026\t7\t0\tbegun\xff", b"\0\0\0", b"2026\t7\t0\t\0"]
)
def test_invalid_line_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "events.tsv").write_bytes(b"2026\t7\t0\tbegun\n" + line + b"\n2027\t7\t0\tended\n")
    with pytest.raises(UserError, match=r"events\.tsv:2: is not an event of a job's script"):
        read_events(tmp_path)
    damaged: list[str] = []
    assert [event.description for event in read_events(tmp_path, damaged)] == ["begun", "ended"]
    assert damaged == [f"{tmp_path}/events.tsv:2: is not an event of a job's script"]
