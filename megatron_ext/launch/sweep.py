"""`selectron sweep`: many runs, each launched as `selectron launch` does, and only those that are not finished."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from megatron_ext.config.schema import RunConfig
from megatron_ext.files import write_whole
from megatron_ext.launch import slurm
from megatron_ext.launch.job import Job, claim, jobs_of, local_environment, unwritable, write_job
from megatron_ext.launch.resources import Resources
from megatron_ext.launch.status import SWEEP, events_of, is_finished

_POLL_SECONDS = 0.2


class Sweep:
    """Runs of one folder.

    Args:
        folder: of their folders.
        configs: whole and checked, by the runs' names.
        resources: of each run.
        python: interpreter of the ranks.
    """

    def __init__(self, folder: Path, configs: Mapping[str, RunConfig], resources: Resources, python: str) -> None:
        self._folder, self._configs, self._resources, self._python = folder, configs, resources, python

    def note(self) -> None:
        """Write down which runs there are, for `selectron status`.

        Raises:
            UserError: the folder cannot be written.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / SWEEP, (json.dumps({"runs": list(self._configs)}, indent=1) + "\n").encode())
        except OSError as error:
            raise unwritable(self._folder, error) from error

    def submit(self) -> None:
        """Submit a job for each run that is neither finished nor has one.

        Raises:
            UserError: Slurm refuses.
        """
        for name in self._unfinished():
            before = jobs_of(self._folder / name)[-1:]
            state = slurm.job_state(before[0].number) if before and before[0].number else None
            if state is not None and state.is_alive:
                print(f"{name}: job {before[0].number} ({state.state.lower()})")
                continue
            job = self._write(name)
            job.keep_number(slurm.submit(job.script))
            print(f"{name}: job {job.number}")

    def run(self, processes: int, parallel: int) -> int:
        """Run them here.

        Args:
            processes: of each run.
            parallel: most runs at a time.

        Returns:
            0 if all are finished in the end, else 1.
        """
        waiting, children = list(self._unfinished()), dict[str, subprocess.Popen[bytes]]()
        with _forwarding(waiting, children):
            while waiting or children:
                while waiting and len(children) < parallel:
                    name = waiting.pop(0)
                    child = self._start(name, processes)
                    if child is not None:
                        children[name] = child
                for name, child in list(children.items()):
                    if child.poll() is not None:
                        del children[name]
                        print(f"{name}: {self._outcome(name)}", flush=True)
                time.sleep(_POLL_SECONDS)
        left = list(self._unfinished())
        if left:
            print(
                f"selectron: {len(left)} of {len(self._configs)} runs are not finished: {', '.join(left)}",
                file=sys.stderr,
            )
        return 1 if left else 0

    def _outcome(self, name: str) -> str:
        """What became of a run's newest job: finished, stopped, refused with the mistake, given up, ..."""
        job = jobs_of(self._folder / name)[-1]
        events = events_of(job)
        return f"{events[-1].what if events else 'did not begin'}" + (
            "" if is_finished(job.run) else f"; see {job.log}"
        )

    def _unfinished(self) -> Iterator[str]:
        return (name for name in self._configs if not is_finished(self._folder / name))

    def _write(self, name: str) -> Job:
        resources = replace(self._resources, job_name=f"{self._resources.job_name}-{name}")
        return write_job(self._configs[name], self._folder / name, resources, self._python)

    def _start(self, name: str, processes: int) -> subprocess.Popen[bytes] | None:
        """Start a run; None where one that was started before still runs."""
        lock = claim(self._folder / name)
        if lock is None:
            print(f"{name}: runs already", flush=True)
            return None
        job = self._write(name)
        with job.log.open("wb") as log, open(lock, "rb") as held:
            print(f"{name}: {job.log}", flush=True)
            # The lock is the child's then, and free when it has ended, however this process ends.
            return subprocess.Popen(
                ["bash", str(job.script)],
                env=local_environment(processes),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[held.fileno()],
                start_new_session=True,
            )


@contextmanager
def _forwarding(waiting: list[str], children: Mapping[str, subprocess.Popen[bytes]]) -> Iterator[None]:
    """SIGTERM and SIGINT stop the runs, which leave checkpoints, and no other is begun."""

    def stop(number: int, _: FrameType | None) -> None:
        waiting.clear()
        for child in children.values():
            child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children.values():  # none, but after an error
            child.send_signal(signal.SIGTERM)


def run_table(configs: Mapping[str, RunConfig], overrides: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Rows of `--dry-run`: a run's name, its steps and tokens, and what it changes."""
    rows = []
    for name, config in configs.items():
        tokens = config.training.steps * config.training.global_batch_size * config.data.seq_length
        rows.append([name, str(config.training.steps), f"{tokens:,}", " ".join(overrides[name])])
    return rows
