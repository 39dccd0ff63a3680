"""Local launcher with small programs instead of training."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from forked import ForkedProcess

from megatron_ext.launch import local
from megatron_ext.launch.local import Timeouts, launch, rank_command, rank_environment
from megatron_ext.utils import error_reporting
from megatron_ext.utils.errors import EXIT_STOPPED

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
rank = int(os.environ["RANK"])
def tell(name):
    open(os.path.join({folder!r}, f"{{name}}{{rank}}"), "w").close()
"""
QUICK = Timeouts(to_terminate=0.3, to_kill=0.3)
LIMIT = 120.0
"""Seconds within which a condition must hold. It is reached only if the launcher is broken."""


def program(folder: Path, body: str) -> list[str]:
    """Return a command whose ranks run `body`."""
    path = folder / "child.py"
    path.write_text(PRELUDE.format(root=str(ROOT), folder=str(folder)) + textwrap.dedent(body))
    return [sys.executable, "-S", str(path)]


def launch_watched(command: list[str], processes: int, listening: Path) -> int:
    """Launch, and create the file `listening` once the launcher handles signals."""
    wait = local._Group.wait

    def tell_and_wait(group: local._Group) -> None:
        listening.touch()
        wait(group)

    with patch.object(local._Group, "wait", tell_and_wait):
        return launch(command, processes, QUICK)


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_files(folder: Path, name: str, processes: int = 2) -> None:
    """Wait until each rank has created its file."""
    wait_for(lambda: all((folder / f"{name}{rank}").exists() for rank in range(processes)))


def start_launcher(folder: Path, body: str) -> ForkedProcess:
    """Start the launcher of two ranks in a separate process and wait until both are ready and it handles signals."""
    launcher = ForkedProcess(launch_watched, [program(folder, body), 2, folder / "listening"])
    wait_for_files(folder, "ready")
    wait_for((folder / "listening").exists)
    return launcher


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # a zombie has ended, too, even if it has not been reaped


def test_rank_environment_equals_torchruns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR".split()
    open(__file__ + f".{rank}", "w").write(" ".join(os.environ[name] for name in names))
    assert int(os.environ["MASTER_PORT"]) > 0 and int(os.environ["OMP_NUM_THREADS"]) >= 1
    print("output of", rank)
    """
    assert launch(program(tmp_path, body), 3, QUICK) == 0
    assert [(tmp_path / f"child.py.{rank}").read_text() for rank in range(3)] == [
        f"{rank} {rank} 3 3 127.0.0.1" for rank in range(3)
    ]
    assert capfd.readouterr().out == "output of 0\n"


def test_threads_are_divided_unless_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert [rank_environment(0, n, 1)["OMP_NUM_THREADS"] for n in (1, 3, 16)] == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert rank_environment(0, 3, 1)["OMP_NUM_THREADS"] == "5"


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.exit(3 if rank == 1 else 0)", 3),
        ("os.kill(os.getpid(), signal.SIGKILL) if rank == 0 else None", 137),
        # The launcher sends SIGTERM once it has seen the failure of rank 1.
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))\nsys.exit(5) if rank == 1 else time.sleep(60)", 5),
    ],
)
def test_exit_code_of_the_first_failure(tmp_path: Path, body: str, code: int) -> None:
    assert launch(program(tmp_path, body), 2, QUICK) == code


def test_crash_is_printed_with_its_rank(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(program(tmp_path, "1 / (1 - rank)"), 2, QUICK) == 1
    shown = capfd.readouterr().err
    assert "selectron: rank 1 of 2 ended with exit code 1" in shown
    assert "[rank 1] ZeroDivisionError: division by zero" in shown
    log = Path(shown.rstrip().rpartition(": ")[2])
    assert "ZeroDivisionError" in log.read_text()
    log.unlink()
    log.parent.rmdir()


def test_error_of_all_ranks_is_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    import megatron_ext.cli as cli
    from megatron_ext.utils.errors import UserError
    def fail(arguments): raise UserError("data.path", f"rank {rank} says no", "mend it")
    cli._dispatch = fail
    sys.exit(cli.main([]))
    """
    assert launch(program(tmp_path, body), 3, Timeouts(to_terminate=LIMIT)) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0] in {f"selectron: error: data.path: rank {rank} says no; mend it" for rank in range(3)}


def test_errors_of_peers_after_a_user_error_are_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
    import megatron_ext.cli as cli
    from megatron_ext.utils.errors import UserError
    def fail(arguments):
        if rank == 1:
            raise UserError("data.path", "no", "mend it")
        while not os.path.exists(os.environ["SELECTRON_ERROR_FILE"]):
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    cli._dispatch = fail
    sys.exit(cli.main([]))
    """
    assert launch(program(tmp_path, body), 2, Timeouts(to_terminate=LIMIT)) == 2
    assert capfd.readouterr().err == "selectron: error: data.path: no; mend it\n"


@pytest.mark.parametrize(
    "survivor", ["time.sleep(60)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
)
def test_hanging_rank_is_killed_after_a_failure(tmp_path: Path, survivor: str) -> None:
    body = f"sys.exit(7) if rank == 1 else None\n{survivor}\ntell('survivor')"
    assert launch(program(tmp_path, body), 2, QUICK) == 7
    assert not list(tmp_path.glob("survivor*"))


COUNT_SIGNALS = """
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: got.append(number))
tell("ready")
while not got:
    time.sleep(0.01)
tell("got")
while not os.path.exists(os.path.join(os.path.dirname(__file__), "end")):
    time.sleep(0.01)
open(__file__ + f".{rank}", "w").write(str([int(number) for number in got]))
sys.exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_each_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start_launcher(tmp_path, COUNT_SIGNALS)
    launcher.send_signal(number)
    wait_for_files(tmp_path, "got")
    if number == signal.SIGTERM:  # schedulers repeat SIGTERM; a repeated Ctrl-C has another meaning
        launcher.send_signal(number)
    time.sleep(0.1)  # in which a second signal would arrive
    (tmp_path / "end").touch()
    _, err = launcher.communicate(timeout=LIMIT)
    assert (launcher.returncode, err) == (0, "")
    assert [(tmp_path / f"child.py.{rank}").read_text() for rank in range(2)] == [str([int(number)])] * 2


@pytest.mark.parametrize("first", ["rank == 0", "rank == 1"])
def test_stopping_ranks_are_not_killed(tmp_path: Path, first: str) -> None:
    """The first rank that exits with that code has not failed. The others may still be writing."""
    body = f"sys.exit(75) if {first} else time.sleep(1)\nopen(__file__ + '.written', 'w')\nsys.exit(75)"
    timeouts = Timeouts(to_terminate=0.0, to_kill=0.1)
    assert launch(program(tmp_path, body), 2, timeouts) == EXIT_STOPPED
    assert (tmp_path / "child.py.written").exists()


def test_failure_takes_precedence_over_a_stop(tmp_path: Path) -> None:
    assert launch(program(tmp_path, "sys.exit(75) if rank == 0 else sys.exit(7)"), 2, QUICK) == 7


def test_unhandled_interrupt_prints_no_traceback(tmp_path: Path) -> None:
    body = "try:\n    tell('ready')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    launcher = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=LIMIT)[1] == ""
    assert launcher.returncode == 130


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    body = "signal.signal(signal.SIGINT, lambda *_: tell('got'))\ntell('ready')\ntime.sleep(600)\n"
    launcher = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGINT)
    wait_for_files(tmp_path, "got")  # two signals at once may be delivered as one
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 137


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    body = "open(__file__ + f'.{rank}', 'w').write(str(os.getpid()))\ntell('ready')\ntime.sleep(600)\n"
    launcher = start_launcher(tmp_path, body)
    pids = [int((tmp_path / f"child.py.{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.wait(timeout=LIMIT)
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    launcher.communicate(timeout=LIMIT)


def test_train_command_repeats_the_arguments() -> None:
    assert rank_command("train", ["c.yaml", "a=b"])[1:] == ["-m", "megatron_ext.cli", "train", "c.yaml", "a=b"]


def test_one_rank_reports_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv(error_reporting.ERROR_FILE, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not error_reporting.is_reported_by_other_rank()
    error_reporting.report_user_error("a: b; c")
    error_reporting.report_user_error("a: b; c")
    assert error_reporting.is_reported_by_other_rank()
    assert capfd.readouterr().err == "selectron: error: a: b; c\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert not error_reporting.is_reported_by_other_rank()


def test_error_is_printed_if_no_file_can_be_created(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(error_reporting.ERROR_FILE, str(tmp_path / "no" / "folder"))
    error_reporting.report_user_error("a: b; c")
    assert capfd.readouterr().err == "selectron: error: a: b; c\n"
