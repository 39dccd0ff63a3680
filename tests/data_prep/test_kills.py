"""`prepare` killed before changes to its folder, and called again: the result equals that of an uninterrupted call.

A change opens a file for writing, renames or removes a file, or makes or removes a folder. A call makes hundreds. The
suite kills before a few of them, spread evenly. With SELECTRON_EVERY_KILL=1, it kills before each one.
"""

import os
from pathlib import Path

import pytest
from kills import DONE, KILLED, changes
from prep_fakes import lines, options, write_jsonl

from data_prep.contamination.overlap import OverlapOptions
from data_prep.prepare import prepare
from data_prep.stages import Filtering

EVERY = bool(os.environ.get("SELECTRON_EVERY_KILL"))
KILLS = 4


def everything(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "filtering",
    [
        Filtering(cleaning=None, duplicates="keep", overlap=None),
        pytest.param(
            Filtering(duplicates="near", overlap=OverlapOptions(action="drop_train")),
            marks=pytest.mark.skipif(not EVERY, reason="takes minutes: SELECTRON_EVERY_KILL=1"),
        ),
    ],
    ids=["one pass", "all stages"],
)
def test_resume_after_a_kill(tmp_path, filtering):
    for name in ("a", "b"):
        write_jsonl(tmp_path / f"raw/{name}.jsonl", lines(["C4", "CommonCrawl", "ArXiv"], 6, name))
    given = {"vocab_size": 260, "tasks": 2, "filtering": filtering}

    def call(root: Path) -> None:
        prepare(options(tmp_path / "raw", root / "out", "train", **given))

    root = tmp_path / "whole"
    root.mkdir()
    ended, number = changes(root, None, lambda: call(root))
    assert (ended, number > 40) == (DONE, True)
    whole = everything(root / "out")
    step = 1 if EVERY else number / KILLS
    for kill_point in sorted({int(step * count) for count in range(int(number / step))} | {number - 1}):
        root = tmp_path / str(kill_point)
        root.mkdir()
        assert changes(root, kill_point, lambda root=root: call(root)) == (KILLED, kill_point)
        ended, _ = changes(root, None, lambda root=root: call(root))
        assert ended == DONE, f"killed before change {kill_point}"
        assert everything(root) == {f"out/{name}": content for name, content in whole.items()}, kill_point
