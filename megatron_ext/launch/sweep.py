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
from megatron_ext.launch.array import restore_job_numbers, write_array
from megatron_ext.launch.branches import find_trunks, group_by_trunk
from megatron_ext.launch.changed_runs import (
    Changed,
    changed_runs,
    check_restarts,
    move_aside,
    runs_without_digests,
    write_data_digests,
)
from megatron_ext.launch.here import start_script
from megatron_ext.launch.job import (
    Job,
    acquire_local_lock,
    copy_code,
    hold_submission_locks,
    list_jobs,
    newest_job,
    next_folder,
    unwritable_error,
    write_job,
)
from megatron_ext.launch.ownership import own_state
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.status import is_finished, read_job_events
from megatron_ext.run_folder.launch_events import LAUNCH
from megatron_ext.run_folder.layout import SWEEP
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
        self._trunks = find_trunks(folder, configs)

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
        return max(map(len, group_by_trunk(self.unfinished, self._trunks).values()), default=0)

    @property
    def changed(self) -> list[Changed]:
        """Runs that were started with a different configuration or data."""
        return changed_runs(self._folder, self._configs, is_finished)

    @property
    def runs_without_digests(self) -> list[str]:
        """Names of launched runs whose data at launch is unknown."""
        return runs_without_digests(self._folder, self._configs)

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
        folders = {name: self._folder / name for name in names if (self._folder / name).exists()}
        with hold_submission_locks(*folders.values()):
            for run in folders.values():
                refuse_alive(run)
            for name, run in folders.items():
                try:
                    new_folder = move_aside(self._folder, name)
                except OSError as error:
                    raise unwritable_error(run, error) from error
                print(f"{name}: restarts; its old folder is now {new_folder}", flush=True)

    def write_run_list(self, chosen: Sequence[str] = ()) -> None:
        """Write the names of the runs to the sweep's folder, for `selectron status`, and chosen fields, for reports.

        Args:
            chosen: fields of which the best value is chosen; see `SweptRuns.chosen`.

        Raises:
            UserError: the folder cannot be written.
        """
        content = {"runs": list(self._configs)} | ({"chosen": list(chosen)} if chosen else {})
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self._folder / SWEEP, (json.dumps(content, indent=1) + "\n").encode())
        except OSError as error:
            raise unwritable_error(self._folder, error) from error

    def submit(self, parallel: int | None) -> None:
        """Submit the unfinished runs without a live job: one array, and one dependent array per unfinished trunk.

        Args:
            parallel: maximum number of concurrent runs per array; None for no limit.

        Raises:
            UserError: Slurm rejects a job.
        """
        restore_job_numbers(self._folder)
        for trunk, names in group_by_trunk(self.unfinished, self._trunks).items():
            with hold_submission_locks(*(self._folder / name for name in names)):
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
        with _stop_on_signals(children) as stop_requested:
            while (waiting and not stop_requested.is_set()) or children:
                for name in self._ready(waiting, children)[: parallel - len(children)]:
                    if stop_requested.is_set():
                        break
                    waiting.remove(name)
                    child = self._start(name, processes)
                    if child is not None:
                        children[name] = child
                        if stop_requested.is_set():  # the signal arrived while the child was started
                            child.send_signal(signal.SIGTERM)
                for name, child in list(children.items()):
                    if child.poll() is not None:
                        del children[name]
                        print(f"{name}: {self._outcome(name)}", flush=True)
                time.sleep(_POLL_SECONDS)
        unfinished = list(self.unfinished)
        if not unfinished:
            return 0
        message = f"{len(unfinished)} of {len(self._configs)} runs are not finished: {', '.join(unfinished)}"
        is_stopped = self._are_stopped(unfinished, stop_requested=stop_requested.is_set())
        hint = "; the same command continues them" if is_stopped else ""
        print(f"selectron: {message}{hint}", file=sys.stderr)
        return EXIT_STOPPED if is_stopped else 1

    def _are_stopped(self, unfinished: Sequence[str], *, stop_requested: bool) -> bool:
        """Return True if each unfinished run was stopped, or not started because this call or its trunk was stopped."""
        last = [self._last_event(name) for name in unfinished]
        return all(event in ("stopped", "") for event in last) and (stop_requested or "stopped" in last)

    def _last_event(self, name: str) -> str:
        """Return the last event of a run's newest job, or an empty string."""
        job = newest_job(self._folder / name)
        events = read_job_events(job) if job is not None else []
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
        job = list_jobs(self._folder / name)[-1]
        events = read_job_events(job)
        return f"{events[-1].description if events else 'did not start'}" + (
            "" if is_finished(job.run) else f"; see {job.log}"
        )

    def _write(self, name: str) -> Job:
        resources = replace(self._resources, job_name=f"{self._resources.job_name}-{name}")
        job = write_job(self._configs[name], self._folder / name, resources, self._python, code=self._code)
        write_data_digests(job, self._configs[name])
        return job

    @cached_property
    def _code(self) -> Path:
        """Copy of the code that all runs started by this call share."""
        folder = (self._folder / _CODE).absolute()
        try:
            folder = next_folder(folder)
        except OSError as error:
            raise unwritable_error(folder, error) from error
        return copy_code(folder)

    def _start(self, name: str, processes: int) -> subprocess.Popen[bytes] | None:
        """Start a run. Return None if an earlier start of the run is still running."""
        lock = acquire_local_lock(self._folder / name)
        if lock is None:
            print(f"{name}: is already running", flush=True)
            return None
        job = self._write(name)
        with job.log.open("wb") as log:
            print(f"{name}: {job.log}", flush=True)
            return start_script(job, processes, lock, log, log)


@contextmanager
def _stop_on_signals(children: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[threading.Event]:
    """Context manager in which SIGTERM and SIGINT stop the runs, which save checkpoints, and set the yielded event."""
    stop_requested = threading.Event()

    def stop(number: int, _: FrameType | None) -> None:
        stop_requested.set()
        for child in list(children.values()):
            child.send_signal(signal.SIGTERM)

    try:
        with handle_signals((signal.SIGTERM, signal.SIGINT), stop):
            yield stop_requested
    finally:
        for child in children.values():  # none are left, except after an error
            child.send_signal(signal.SIGTERM)
