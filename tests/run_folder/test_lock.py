"""Lock of a run folder: acquisition, detection of dead holders, and behaviour of a holder that lost it."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.run_folder import lock as lock_module
from megatron_ext.run_folder import lock_file
from megatron_ext.run_folder.lock import BEAT_SECONDS, CONFIRM_SECONDS, Clock, LockLost, RunLock, acquire, hold_locks
from megatron_ext.run_folder.lock_file import DEAD_SECONDS, lock_state, read_newest_holder
from megatron_ext.run_folder.process_identity import ProcessIdentity, this_process
from megatron_ext.utils.errors import UserError

ROOT = Path(__file__).parents[2]
HERE = this_process()
ELSEWHERE = ProcessIdentity(host="n2", pids="another boot", pid=HERE.pid, started="1")
JOB = dataclasses.replace(ELSEWHERE, job="7")


class FakeClock:
    """Fake clock that advances only by sleeping, and calls a function after each sleep."""

    def __init__(self, meanwhile: Callable[[float], object] = lambda now: None) -> None:
        self.time, self._meanwhile = 1000.0, meanwhile

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self._meanwhile(self.time - 1000.0)

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.time, self.sleep)


def acquire_lock(
    folder: Path,
    process: ProcessIdentity | None = None,
    clock: FakeClock | None = None,
    messages: list[str] | None = None,
) -> RunLock:
    messages = [] if messages is None else messages
    return acquire(folder, "runs/a", process=process, clock=(clock or FakeClock()).clock, print_line=messages.append)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").touch()  # the run folder is not empty
    return tmp_path / "lock"


@pytest.fixture
def unchanged(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds for which every lock file is unchanged, however long the test takes: 0 until a test sets others."""
    seconds = [0.0]
    monkeypatch.setattr(lock_file, "unchanged_seconds", lambda _: seconds[0])
    return seconds


def test_live_local_holder_is_named_at_once(folder: Path) -> None:
    first, clock = acquire_lock(folder), FakeClock()
    with pytest.raises(UserError) as error:
        acquire_lock(folder, clock=clock)
    since = first.holder.since
    assert str(error.value).startswith(f"runs/a: is held by process {HERE.pid} on {HERE.host}, since {since}; wait")
    assert clock.time == 1000.0


@pytest.mark.parametrize(
    ("job", "how"),
    [
        ("7", "`scancel 7`"),
        (None, f"`kill {HERE.pid}` on its machine"),
        ("7; rm x", f"`kill {HERE.pid}` on its machine"),
    ],
    ids=["job", "no job", "no job's number"],
)
def test_hint_names_the_command_that_stops_the_holder(folder: Path, job: str | None, how: str) -> None:
    acquire_lock(folder, dataclasses.replace(HERE, job=job))
    with pytest.raises(UserError) as error:
        acquire_lock(folder)
    assert error.value.hint == f"wait until it exits, or stop it: {how}"


def test_released_lock_is_acquired_at_once(folder: Path) -> None:
    acquire_lock(folder, ELSEWHERE).release()
    clock = FakeClock()
    assert acquire_lock(folder, clock=clock).holder.number == 2
    assert (clock.time, os.listdir(folder)) == (1000.0, ["2"])


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"started": "1"}], ids=["no such pid", "pid used again"])
def test_lock_of_a_dead_local_process_is_taken_over_at_once(folder: Path, change: dict[str, str | int]) -> None:
    acquire_lock(folder, dataclasses.replace(HERE, **change))
    clock = FakeClock()
    assert acquire_lock(folder, clock=clock).holder.number == 2
    assert clock.time == 1000.0


def test_a_zombie_is_dead(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        assert fields[0] == "Z"
        assert dataclasses.replace(HERE, pid=child.pid, started=fields[19]).exists() is False


def test_lock_of_a_live_remote_holder_is_refused_at_its_next_beat(folder: Path) -> None:
    other, messages = acquire_lock(folder, ELSEWHERE), list[str]()
    clock = FakeClock(lambda now: other.beat() if now == BEAT_SECONDS else None)
    with pytest.raises(UserError, match=r"is held by process \d+ on n2"):
        acquire_lock(folder, clock=clock, messages=messages)
    assert clock.time == 1000.0 + BEAT_SECONDS
    assert [line.partition(": waiting up to")[0] for line in messages] == [f"runs/a was held by {other.holder}"]
    other.check()


def test_lock_of_a_silent_remote_holder_is_taken_over_after_the_timeout(folder: Path, unchanged: list[float]) -> None:
    other, clock = acquire_lock(folder, ELSEWHERE), FakeClock()
    lock = acquire_lock(folder, clock=clock)
    assert clock.time - 1000.0 == DEAD_SECONDS
    with pytest.raises(LockLost, match=rf"was taken over by process {HERE.pid} on {HERE.host}, since"):
        other.check()
    with pytest.raises(LockLost):
        other.beat()
    other.release()  # does not release the other's lock
    lock.check()
    assert lock_state(folder) == lock_file.LockState(lock.holder, True, 0.0)


def test_clocks_of_machines_are_not_compared(folder: Path) -> None:
    """A holder whose clock is years behind or ahead counts as alive."""
    for since in ("1990-01-01T00:00:00Z", "2090-01-01T00:00:00Z"):
        other = acquire_lock(folder, ELSEWHERE)
        other.holder = dataclasses.replace(other.holder, since=since)
        clock = FakeClock(lambda _, other=other: other.beat())  # type: ignore[misc]
        with pytest.raises(UserError, match=since):
            acquire_lock(folder, clock=clock)
        other.release()


def test_lock_that_is_old_by_the_servers_clock_is_observed_briefly(folder: Path) -> None:
    acquire_lock(folder, ELSEWHERE)
    os.utime(folder / "1", (1.0, 1.0))
    clock = FakeClock()
    acquire_lock(folder, clock=clock)
    assert CONFIRM_SECONDS <= clock.time - 1000.0 < CONFIRM_SECONDS + 1
    assert CONFIRM_SECONDS > 2 * BEAT_SECONDS  # else a servers' clock set ahead would take the lock from the living


def test_lock_with_a_future_timestamp_is_observed_for_the_full_timeout(folder: Path) -> None:
    acquire_lock(folder, ELSEWHERE)
    os.utime(folder / "1", (4e9, 4e9))
    clock = FakeClock()
    acquire_lock(folder, clock=clock)
    assert clock.time - 1000.0 >= DEAD_SECONDS


@pytest.mark.parametrize("ahead", [-3600.0, 0.0, 3600.0])
def test_age_of_a_lock_file(folder: Path, ahead: float) -> None:
    acquire_lock(folder, ELSEWHERE)
    now = time.time()
    os.utime(folder / "1", (now + ahead,) * 2)
    age = lock_file.unchanged_seconds(folder / "1")
    assert -ahead - 0.1 < age < -ahead + (time.time() - now) + 0.1  # the clock of a file system is a little coarse


@pytest.mark.parametrize(("age", "is_held"), [(60.0, False), (59.9, True), (-59.9, True), (-60.0, False)])
def test_lock_state_depends_on_the_age_of_the_file(
    folder: Path, unchanged: list[float], age: float, is_held: bool
) -> None:
    acquire_lock(folder, ELSEWHERE)
    unchanged[0] = age
    state = lock_state(folder)
    assert state is not None
    assert state.is_held == is_held


def test_requeued_job_takes_over_the_lock_at_once(folder: Path) -> None:
    before, clock = acquire_lock(folder, JOB), FakeClock()
    again = acquire_lock(folder, dataclasses.replace(HERE, job="7", restarts=1), clock)
    assert clock.time == 1000.0
    with pytest.raises(LockLost, match=r"was taken over by .*, job 7, restart 1, since"):
        before.check()
    again.check()
    with pytest.raises(UserError, match=r"is held by .*, job 7, restart 1"):  # the lock is not restored
        acquire_lock(folder, JOB, clock)
    assert clock.time == 1000.0


def test_another_job_waits_for_the_timeout(folder: Path, unchanged: list[float]) -> None:
    acquire_lock(folder, JOB)
    clock = FakeClock()
    acquire_lock(folder, dataclasses.replace(HERE, job="8", restarts=1), clock)
    assert clock.time - 1000.0 == DEAD_SECONDS


def test_suspended_process_finds_its_lock_lost(folder: Path) -> None:
    """The lock has passed to two later holders, so the file of the next number no longer exists."""
    slow = acquire_lock(folder, ELSEWHERE)
    for _ in range(3):
        acquire_lock(folder).release()
    assert read_newest_holder(folder).number == 4  # type: ignore[union-attr]
    with pytest.raises(LockLost):
        slow.check()


@pytest.mark.parametrize("what", ["lock", "whole run"])
def test_removed_folder_is_a_lost_lock(tmp_path: Path, what: str) -> None:
    lock = acquire_lock(tmp_path / "run" / "lock")
    for path in sorted((tmp_path / "run").rglob("*"), reverse=True) + [tmp_path / "run"] * (what == "whole run"):
        path.rmdir() if path.is_dir() else path.unlink()
    with pytest.raises(LockLost, match="was removed or replaced while it was held"):
        lock.check()
    other = acquire_lock(tmp_path / "run" / "lock")  # same number
    with pytest.raises(LockLost, match="was taken over by"):
        lock.check()
    lock.release()
    other.check()
    assert lock_state(tmp_path / "run" / "lock").is_held  # type: ignore[union-attr]


def test_stale_lock_number_cannot_be_created(folder: Path) -> None:
    """A slow process saw number 1 released. Meanwhile 2 was taken and released, and 3 removed its file."""
    for _ in range(2):
        acquire_lock(folder).release()
    lock = acquire_lock(folder)
    assert lock_file.create(folder, 2, ELSEWHERE) is None
    lock.check()
    assert os.listdir(folder) == ["3"]


def test_link_call_repeated_by_nfs_succeeds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def twice(source: Path, target: Path) -> None:  # a network file system may repeat a call
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", twice)
    acquire_lock(folder).check()


def test_lock_without_hard_links(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    acquire_lock(folder)
    with pytest.raises(UserError, match="is held by"):
        acquire_lock(folder)


@pytest.mark.parametrize("content", [b"", b'{"number": 1, "tok', b"\0" * 1024, b"\xff\xfe", b"[]", b"[" * 2000])
def test_damaged_lock_is_taken_over_after_the_timeout(folder: Path, unchanged: list[float], content: bytes) -> None:
    folder.mkdir()
    (folder / "1").write_bytes(content)
    clock, messages = FakeClock(), list[str]()
    assert acquire_lock(folder, clock=clock, messages=messages).holder.number == 2
    assert clock.time - 1000.0 == DEAD_SECONDS
    assert "by an unidentified process" in messages[0]


def test_damaged_lock_that_changes_is_held(folder: Path) -> None:
    folder.mkdir()
    (folder / "1").write_bytes(b"x")
    with pytest.raises(UserError, match="is held by an unidentified process"):
        acquire_lock(folder, clock=FakeClock(lambda now: (folder / "1").write_text(f"x{now}")))


@pytest.mark.parametrize("kind", ["dangling link", "folder"])
def test_lock_that_is_not_a_regular_file_is_rejected(folder: Path, kind: str) -> None:
    folder.mkdir()
    (folder / "1").mkdir() if kind == "folder" else (folder / "1").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"cannot be written|could not be locked"):
        acquire_lock(folder)


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(UserError, match=r"run/lock: cannot be written \(Not a directory\)"):
        acquire_lock(tmp_path / "run" / "lock")


def test_run_without_files_leaves_no_folder(tmp_path: Path) -> None:
    acquire_lock(tmp_path / "run" / "lock").release()
    assert os.listdir(tmp_path) == []


def test_thread_updates_the_lock_and_reports_its_loss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lock_module, "GRACE_SECONDS", 0.01)
    stuck = threading.Event()
    with hold_locks(lock := acquire_lock(folder, JOB), on_stuck=lambda _: stuck.set()):
        first = lock_file.read_content(folder / "1")
        while lock_file.read_content(folder / "1") == first:
            pass
        lock.check_if_due()
        acquire_lock(folder, dataclasses.replace(JOB, restarts=1))
        assert stuck.wait(120)
    state = lock_state(folder)
    assert state is not None
    assert state.is_held
    assert state.holder is not None
    assert state.holder.process.restarts == 1


def test_frequent_check_runs_once_per_second(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(lock_module.time, "monotonic", lambda: now[0])
    lock = acquire_lock(folder, JOB)
    acquire_lock(folder, dataclasses.replace(JOB, restarts=1))
    lock.check_if_due()
    now[0] = 1.0
    with pytest.raises(LockLost):
        lock.check_if_due()


CONTEND = """
import os, sys, time
from pathlib import Path
from megatron_ext.utils.errors import UserError
from megatron_ext.run_folder.lock import acquire
rounds, root, name = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
print("ready", flush=True)
for number in range(rounds):
    sys.stdin.readline()  # both begin a round at one moment
    run = root / str(number % 7)  # some are new, some were released before
    try:
        lock = acquire(run / "lock", "run", print_line=lambda line: None)
    except UserError as error:
        print("refused" if "is held by process" in str(error) else f"error {error}", flush=True)
        sys.stdin.readline()
        continue
    lock.check()
    print("held", flush=True)
    sys.stdin.readline()
    lock.check()
    if number % 3 == 2:
        Path(run, "data").touch()
    lock.release()
    print("released", flush=True)
"""


def test_one_of_three_concurrent_processes_gets_the_lock(tmp_path: Path) -> None:
    rounds, processes = 150, list[subprocess.Popen[str]]()
    for name in "abc":
        command = [sys.executable, "-c", CONTEND, str(rounds), str(tmp_path), name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        processes.append(subprocess.Popen(command, text=True, cwd=ROOT, bufsize=1, **pipes))  # type: ignore[call-overload]

    def each(command: bool) -> list[str]:
        for process in processes if command else ():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        return [process.stdout.readline().strip() for process in processes]  # type: ignore[union-attr]

    try:
        assert each(command=False) == ["ready"] * 3
        for number in range(rounds):
            outcomes = each(command=True)
            assert sorted(outcomes) == ["held", "refused", "refused"], f"round {number}: {outcomes}"
            holder = processes[outcomes.index("held")]
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            assert holder.stdout is not None
            assert holder.stdout.readline() == "released\n"
    finally:
        for process in processes:
            process.kill()
            process.communicate()
