"""Implementation of `selectron sweep`: launch all unfinished runs of a sweep, each as `selectron launch` does."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FrameType

from megatron_ext.config.schema import RunConfig
from megatron_ext.launch.array import find_lost, write_array
from megatron_ext.launch.branches import in_order, trunks_of
from megatron_ext.launch.changed_runs import (
    Changed,
    changed_runs,
    check_restarts,
    keep_data_digests,
    set_aside,
    without_digests,
)
from megatron_ext.launch.here import start_here
from megatron_ext.launch.job import (
    Job,
    claim,
    copy_code,
    jobs_of,
    newest_job,
    next_folder,
    submitting,
    unwritable,
    write_job,
)
from megatron_ext.launch.ownership import own_state
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.status import SWEEP, events_of, is_finished
from megatron_ext.run_folder.launch_events import LAUNCH
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.errors import EXIT_STOPPED
from megatron_ext.utils.signals import handle_signals

_POLL_SECONDS = 0.2
_CODE = Path(LAUNCH) / "code"


class Sweep:
    """Runs of a sweep, in one folder.

    Args:
        folder: folder that contains the run folders.
        configs: whole, checked configurations by run name.
        resources: resources of each run.
        python: Python interpreter of the ranks.

    Raises:
        UserError: a run branches from a checkpoint that its trunk will not keep.
    """

    def __init__(self, folder: Path, configs: Mapping[str, RunConfig], resources: Resources, python: str) -> None:
        self._folder, self._configs, self._resources, self._python = folder, configs, resources, python
        self._trunks = trunks_of(folder, configs)

    @property
    def unfinished(self) -> dict[str, RunConfig]:
        """Configurations of the unfinished runs, by name."""
        return {name: config for name, config in self._configs.items() if not is_finished(self._folder / name)}

    @property
    def waiting(self) -> set[str]:
        """Names of the runs that branch from a run that is not finished."""
        return {name for name, trunk in self._trunks.items() if not is_finished(self._folder / trunk)}

    def largest_array(self) -> int:
        """Return the number of tasks of the largest array that `submit` may request."""
        return max(map(len, in_order(self.unfinished, self._trunks).values()), default=0)

    @property
    def changed(self) -> list[Changed]:
        """Runs that were started with a different configuration or data."""
        return changed_runs(self._folder, self._configs, is_finished)

    @property
    def without_digests(self) -> list[str]:
        """Names of launched runs whose data at launch is unknown."""
        return without_digests(self._folder, self._configs)

    def check_restarts(self, restarts: Sequence[str]) -> None:
        """Check the names of runs to restart; see `changed_runs.check_restarts`."""
        check_restarts(restarts, self._configs, self._trunks)

    def restart(self, names: Sequence[str], refuse_alive: Callable[[Path], object]) -> None:
        """Move runs aside, so that they start from the beginning. Either all runs pass the check or none is moved.

        Args:
            names: names of the runs.
            refuse_alive: function that raises an error if the run in a folder has a live job or is being trained.

        Raises:
            UserError: a run is alive or cannot be moved.
        """
        there = {name: self._folder / name for name in names if (self._folder / name).exists()}
        with submitting(*there.values()):
            for run in there.values():
                refuse_alive(run)
            for name, run in there.items():
                try:
                    kept = set_aside(self._folder, name)
                except OSError as error:
                    raise unwritable(run, error) from error
                print(f"{name}: restarts; its old folder is now {kept}", flush=True)

    def note(self) -> None:
        """Write the names of the runs to the sweep's folder, for `selectron status`.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(
                self._folder / SWEEP, (json.dumps({"runs": list(self._configs)}, indent=1) + "\n").encode()
            )
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def submit(self, parallel: int | None) -> None:
        """Submit the unfinished runs without a live job: one array, and one dependent array per unfinished trunk.

        Args:
            parallel: maximum number of concurrent runs per array; None for no limit.

        Raises:
            UserError: Slurm rejects a job.
        """
        find_lost(self._folder)
        for trunk, names in in_order(self.unfinished, self._trunks).items():
            with submitting(*(self._folder / name for name in names)):
                self._submit_array(trunk, [name for name in names if not self._is_alive(name)], parallel)

    def _submit_array(self, trunk: str | None, names: Sequence[str], parallel: int | None) -> None:
        if not names:
            return
        jobs = [self._write(name) for name in names]
        before = newest_job(self._folder / trunk) if trunk else None
        after = before.number if before else None
        write_array(self._folder, jobs, self._resources, parallel=parallel, after=after).submit()
        for name, job in zip(names, jobs, strict=True):
            print(f"{name}: job {job.number}" + (f", after {trunk}" if trunk else ""))

    def _is_alive(self, name: str) -> bool:
        """Return True if a run has a waiting or running job, and print the job."""
        job = newest_job(self._folder / name)
        state = own_state(job)
        if job is None or state is None or not state.is_alive:
            return False
        print(f"{name}: job {job.number} ({state.state.lower()})")
        return True

    def run(self, processes: int, parallel: int) -> int:
        """Run the unfinished runs on this machine.

        Args:
            processes: number of processes of each run.
            parallel: maximum number of concurrent runs.

        Returns:
            Exit code: 0 if all runs are finished, 75 if all unfinished runs were stopped and none failed, else 1.
        """
        waiting, children = list(self.unfinished), dict[str, subprocess.Popen[bytes]]()
        with _forwarding(children) as asked_to_stop:
            while (waiting and not asked_to_stop.is_set()) or children:
                for name in self._ready(waiting, children)[: parallel - len(children)]:
                    if asked_to_stop.is_set():
                        break
                    waiting.remove(name)
                    child = self._start(name, processes)
                    if child is not None:
                        children[name] = child
                        if asked_to_stop.is_set():  # the signal arrived while the child was started
                            child.send_signal(signal.SIGTERM)
                for name, child in list(children.items()):
                    if child.poll() is not None:
                        del children[name]
                        print(f"{name}: {self._outcome(name)}", flush=True)
                time.sleep(_POLL_SECONDS)
        left = list(self.unfinished)
        if not left:
            return 0
        among = f"{len(left)} of {len(self._configs)} runs are not finished: {', '.join(left)}"
        is_stopped = self._are_stopped(left, asked=asked_to_stop.is_set())
        again = "; the same command continues them" if is_stopped else ""
        print(f"selectron: {among}{again}", file=sys.stderr)
        return EXIT_STOPPED if is_stopped else 1

    def _are_stopped(self, left: Sequence[str], *, asked: bool) -> bool:
        """Return True if each unfinished run was stopped, or not started because this call or its trunk was stopped."""
        last = [self._last_event(name) for name in left]
        return all(what in ("stopped", "") for what in last) and (asked or "stopped" in last)

    def _last_event(self, name: str) -> str:
        """Return the last event of a run's newest job, or an empty string."""
        job = newest_job(self._folder / name)
        events = events_of(job) if job is not None else []
        return events[-1].description if events else ""

    def _ready(self, waiting: list[str], children: Mapping[str, object]) -> list[str]:
        """Return the waiting runs that can start. Remove those whose trunk will not be finished from `waiting`."""
        ready = []
        for name in list(waiting):
            trunk = self._trunks.get(name)
            if trunk is None or is_finished(self._folder / trunk):
                ready.append(name)
            elif trunk not in waiting and trunk not in children:
                waiting.remove(name)
                print(f"{name}: not started because {trunk} is not finished", flush=True)
        return ready

    def _outcome(self, name: str) -> str:
        """Describe the result of a run's newest job: finished, stopped, refused with the error, given up, ..."""
        job = jobs_of(self._folder / name)[-1]
        events = events_of(job)
        return f"{events[-1].description if events else 'did not start'}" + (
            "" if is_finished(job.run) else f"; see {job.log}"
        )

    def _write(self, name: str) -> Job:
        resources = replace(self._resources, job_name=f"{self._resources.job_name}-{name}")
        job = write_job(self._configs[name], self._folder / name, resources, self._python, code=self._code)
        keep_data_digests(job, self._configs[name])
        return job

    @cached_property
    def _code(self) -> Path:
        """Copy of the code that all runs started by this call share."""
        folder = (self._folder / _CODE).absolute()
        try:
            folder = next_folder(folder)
        except OSError as error:
            raise unwritable(folder, error) from error
        return copy_code(folder)

    def _start(self, name: str, processes: int) -> subprocess.Popen[bytes] | None:
        """Start a run. Return None if an earlier start of the run is still running."""
        lock = claim(self._folder / name)
        if lock is None:
            print(f"{name}: is already running", flush=True)
            return None
        job = self._write(name)
        with job.log.open("wb") as log:
            print(f"{name}: {job.log}", flush=True)
            return start_here(job, processes, lock, log, log)


@contextmanager
def _forwarding(children: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[threading.Event]:
    """Context manager in which SIGTERM and SIGINT stop the runs, which save checkpoints, and set the yielded event."""
    asked = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        asked.set()
        for child in list(children.values()):
            child.send_signal(signal.SIGTERM)

    try:
        with handle_signals((signal.SIGTERM, signal.SIGINT), stop):
            yield asked
    finally:
        for child in children.values():  # none are left, except after an error
            child.send_signal(signal.SIGTERM)
