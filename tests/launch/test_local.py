"""Local launcher with small programs instead of training."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
from forked import ForkedProcess

from megatron_ext.launch.local import Timeouts, launch, rank_command, rank_environment
from megatron_ext.utils import error_reporting
from megatron_ext.utils.errors import EXIT_STOPPED

ROOT = Path(__file__).parents[2]
PRELUDE = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
rank = int(os.environ["RANK"])
def ready():
    open(os.path.join({folder!r}, f"ready{{rank}}"), "w").close()
"""
QUICK = Timeouts(to_terminate=0.3, to_kill=0.3)


def program(folder: Path, body: str) -> list[str]:
    """Return a command whose ranks run `body`."""
    path = folder / "child.py"
    path.write_text(PRELUDE.format(root=str(ROOT), folder=str(folder)) + textwrap.dedent(body))
    return [sys.executable, "-S", str(path)]


def start_launcher(folder: Path, body: str, processes: int = 2) -> ForkedProcess:
    """Start the launcher in a separate process and wait until its ranks are ready."""
    launcher = ForkedProcess(launch, [program(folder, body), processes, QUICK])
    deadline = time.monotonic() + 20
    while not all((folder / f"ready{rank}").exists() for rank in range(processes)):
        assert time.monotonic() < deadline, launcher.communicate(timeout=1)
        time.sleep(0.02)
    return launcher


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie has ended, too, even if it has not been reaped.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


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
        ("time.sleep(0.1 * rank); sys.exit(5 + rank)", 5),
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
    assert launch(program(tmp_path, body), 3, Timeouts(to_terminate=10)) == 2
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
    assert launch(program(tmp_path, body), 2, Timeouts(to_terminate=10)) == 2
    assert capfd.readouterr().err == "selectron: error: data.path: no; mend it\n"


@pytest.mark.parametrize(
    "survivor", ["time.sleep(60)", "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
)
def test_hanging_rank_is_killed_after_a_failure(tmp_path: Path, survivor: str) -> None:
    start = time.monotonic()
    code = launch(program(tmp_path, f"sys.exit(7) if rank == 1 else None\n{survivor}"), 2, QUICK)
    assert code == 7
    assert time.monotonic() - start < 10


COUNT_SIGNALS = """
got = []
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: got.append(number))
ready()
while not got:
    time.sleep(0.01)
time.sleep(0.4)
open(__file__ + f".{rank}", "w").write(str([int(number) for number in got]))
sys.exit(0)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_each_rank_once(tmp_path: Path, number: signal.Signals) -> None:
    launcher = start_launcher(tmp_path, COUNT_SIGNALS)
    launcher.send_signal(number)
    time.sleep(0.1)
    if number == signal.SIGTERM:  # schedulers repeat SIGTERM; a repeated Ctrl-C has another meaning
        launcher.send_signal(number)
    _, err = launcher.communicate(timeout=20)
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
    body = "ready()\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    sys.exit(130)\n"
    launcher = start_launcher(tmp_path, body)
    launcher.send_signal(signal.SIGINT)
    assert launcher.communicate(timeout=20)[1] == ""
    assert launcher.returncode == 130


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    launcher = start_launcher(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(60)\n")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 137


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_ranks_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    body = "open(__file__ + f'.{rank}', 'w').write(str(os.getpid()))\nready()\ntime.sleep(60)\n"
    launcher = start_launcher(tmp_path, body)
    pids = [int((tmp_path / f"child.py.{rank}").read_text()) for rank in range(2)]
    launcher.kill()
    launcher.wait(timeout=10)
    deadline = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launcher.communicate(timeout=10)


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
