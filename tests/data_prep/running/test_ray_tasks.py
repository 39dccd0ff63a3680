"""Tasks for Ray, without Ray. The fake runner continues after failed tasks, as datatrove's executor does."""

from __future__ import annotations

import contextlib
import sys
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
from datatrove.executor import RayPipelineExecutor
from prep_fakes import options

from data_prep.prepare import prepare
from data_prep.running.execution import Execution
from data_prep.running.ray_tasks import RayExecutor
from megatron_ext.utils.errors import UserError

ON_RAY = Execution(executor="ray", workers=2)
NODE = {"Alive": True, "Resources": {"CPU": 1.0, "memory": 2.0 * 2**30}}
"""Node with room for one task, in the format of `ray.nodes()` (Ray 2.60)."""


@pytest.fixture
def started_tasks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """List of the started tasks, in order."""
    ranks: list[int] = []

    def run(executor: RayPipelineExecutor) -> None:
        pipeline = executor.pipeline
        for rank in executor.get_incomplete_ranks():
            ranks.append(rank)
            executor.pipeline = deepcopy(pipeline)  # a Ray task has its own copy, too
            with contextlib.suppress(Exception):
                executor._run_for_rank(rank)

    monkeypatch.setattr(RayPipelineExecutor, "run", run)
    ray = SimpleNamespace(is_initialized=lambda: True, nodes=lambda: [NODE], __spec__=object())
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ranks


def _executor(folder: Path, *steps: object) -> RayExecutor:
    return RayExecutor(list(steps), tasks=3, workers=1, logging_dir=str(folder))


def test_ray_gives_the_local_result(records, tmp_path, tokenizer_file, started_tasks) -> None:  # type: ignore[no-untyped-def]
    for name, execution in (("here", Execution()), ("ray", ON_RAY)):
        prepare(options(records, tmp_path / name, tokenizer_file, tasks=2, execution=execution))
    local, on_ray = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "here", tmp_path / "ray")
    )
    assert local == on_ray
    assert started_tasks


def test_task_error_is_raised_and_stops_the_stages(  # type: ignore[no-untyped-def]
    records, tmp_path, tokenizer_file, started_tasks
) -> None:
    with (records / "b.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match=r"b\.jsonl:\d+: not JSON .*; repair it or pass --on-error skip"):
        prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, execution=ON_RAY))
    assert started_tasks == [0, 1]


def test_no_task_starts_after_a_failure(tmp_path: Path, started_tasks: list[int]) -> None:
    done: list[int] = []

    def work(data: object, rank: int, world_size: int) -> None:
        if rank == 1 and not (tmp_path / "mended").exists():
            raise UserError("file:7", "is broken", "mend it")
        done.append(rank)

    with pytest.raises(UserError, match=r"^file:7: is broken; mend it$"):
        _executor(tmp_path / "notes", work).run()
    assert done == [0]
    (tmp_path / "mended").touch()
    _executor(tmp_path / "notes", work).run()
    assert done == [0, 1, 2]


def test_traceback_of_an_unexpected_error(tmp_path: Path, started_tasks: list[int]) -> None:
    def divide(data: object, rank: int, world_size: int) -> None:
        _ = 1 / 0

    with pytest.raises(RuntimeError, match=r"a task failed on Ray\nTraceback(.|\n)*in divide(.|\n)*ZeroDivisionError"):
        _executor(tmp_path / "notes", divide).run()


def test_tasks_that_end_without_an_error(
    tmp_path: Path, started_tasks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RayPipelineExecutor, "run", lambda _: None)
    with pytest.raises(UserError, match=r"^--executor: 3 of 3 tasks ended on Ray without an error message"):
        _executor(tmp_path / "notes").run()


@pytest.mark.parametrize(
    ("node", "waits"),
    [
        (NODE, False),
        ({"Alive": True, "Resources": {"CPU": 8.0, "memory": 2.0 * 2**30 - 1}}, True),
        ({"Alive": True, "Resources": {"memory": 2.0**40}}, True),
        ({**NODE, "Alive": False}, True),
    ],
    ids=["fits", "memory", "no CPU", "gone"],
)
def test_warning_if_no_node_fits_a_task(  # type: ignore[no-untyped-def]
    node: dict[str, object], waits: bool, tmp_path: Path, started_tasks, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(sys.modules["ray"], "nodes", lambda: [node])
    _executor(tmp_path / "notes").run()
    message = "no node of the Ray cluster offers the 1 CPU and 2 GiB of memory that a task requires; waiting for one "
    message += "that does"
    assert capsys.readouterr().err == (f"selectron: warning: {message}\n" if waits else "")
    _executor(tmp_path / "notes").run()
    assert capsys.readouterr().err == "", "a stage with nothing left to run waits for nothing"
