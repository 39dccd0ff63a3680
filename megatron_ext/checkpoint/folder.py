"""Checkpoints on disk: `step_N/` folders and `latest`, and the record that tells a whole one from a damaged one.

A checkpoint is written beside, as `.step_N.partial`, and renamed when every rank is done and its files hold what was
written; `latest` moves after that. Whatever happens in between, what was there before stays loadable.
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.contents import Content, content_of
from megatron_ext.checkpoint.disk import NotAsWritten
from megatron_ext.errors import UserError
from megatron_ext.files import LARGEST_POINTER, os_reason, read_regular, write_whole
from megatron_ext.json_text import parse_json
from megatron_ext.paths import relative_name

RECORD = "checkpoint.json"
LATEST = "latest"

_MOST = 1 << 62
"""Above any number of steps, samples or tokens; fits int64."""

_STEP = re.compile(r"step_[0-9]{1,18}")

TO_TRAIN = "name another step with --from-step"
"""What `selectron train` can do where a checkpoint is no good."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not there, or not as it was written: another may be."""


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    Attributes:
        step: optimizer steps done.
        samples: training samples consumed: the data position, an index into the run's one order.
        tokens: training tokens consumed.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Record:
    """What is written beside the state when it is whole.

    Attributes:
        progress: how far the run was.
        identity: the configuration's values that another run must share to continue from here.
        generators: layout that the generators' states belong to.
        files: what every file of the checkpoint holds.
        model_only: whether it holds the model without optimizer, generators and data position, as conversion writes.
    """

    progress: Progress
    identity: dict[str, Any]
    generators: list[int]
    files: dict[str, Content]
    model_only: bool = False


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        newest: so many of the newest; 0: all.
        every: those whose step is a multiple of this stay besides; 0: none.
    """

    newest: int = 0
    every: int = 0

    def dropped(self, steps: list[int], step: int) -> list[int]:
        """Steps whose checkpoints go when one has been saved.

        Args:
            steps: of the checkpoints that are there, ascending.
            step: that was saved. Later ones are of a run that was continued from before them: they neither count nor
                go, and are replaced when their step comes.
        """
        until = [other for other in steps if other <= step]
        old = until[: -self.newest] if self.newest else []
        return [other for other in old if not self.every or other % self.every]


class CheckpointFolder:
    """The `checkpoints/` folder of a run.

    Args:
        root: the folder; made when the first checkpoint is begun.
        another: the mend where a checkpoint is no good: how the command at work is told of another one.
    """

    def __init__(self, root: Path, another: str = TO_TRAIN) -> None:
        self.root, self._another = root, another

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, once it is whole."""
        return self.root / f"step_{step}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written until it is whole."""
        return self.root / f".step_{step}.partial"

    def steps(self) -> list[int]:
        """Steps whose checkpoints are whole, ascending."""
        found = (path.parent.name for path in self.root.glob(f"step_*/{RECORD}"))
        # Somebody may keep a step_6.copy there.
        return sorted(int(name.removeprefix("step_")) for name in found if _STEP.fullmatch(name))

    def latest(self) -> int | None:
        """Step of the newest checkpoint; None where there is none.

        Raises:
            UserError: `latest` does not name a step.
        """
        pointer = self.root / LATEST
        if not pointer.exists():
            return None
        try:
            name = read_regular(pointer, LARGEST_POINTER).decode(errors="replace").strip()
        except OSError as error:
            raise UserError(str(pointer), f"cannot be read ({os_reason(error)})", "restore or remove it") from error
        if _STEP.fullmatch(name) is None:
            there = ", ".join(f"step_{step}" for step in self.steps())
            mend = f"write one of them into it: {there}" if there else "no checkpoint is there: remove the file"
            raise UserError(str(pointer), f"{name!r} names no checkpoint", mend)
        return int(name.removeprefix("step_"))

    def go_back(self, step: int) -> None:
        """Let `latest` name an earlier checkpoint, from which the run is trained anew.

        The records of later steps are dropped then. A run that is killed before its next checkpoint must not go on from
        a later one, which would leave a hole in them.

        Args:
            step: of a whole checkpoint.

        Raises:
            OSError: the disk refuses.
        """
        pointer, content = self.root / LATEST, f"step_{step}\n".encode()
        with suppress(OSError):  # what cannot be read, or is larger, says something else
            if read_regular(pointer, len(content)) == content:
                return
        write_whole(pointer, content)

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into; what runs that were killed left is removed."""
        for left in self.root.glob(".step_*"):
            shutil.rmtree(left, ignore_errors=True)
        partial = self.partial(step)
        partial.mkdir(parents=True)
        return partial

    def finish(
        self, step: int, record_parts: dict[str, Any], written: dict[str, Content], retention: Retention
    ) -> None:
        """Make a written checkpoint whole: record, rename, move `latest`, drop what is not to be kept.

        Args:
            step: of the checkpoint; its state lies in the folder that `begin` gave.
            record_parts: progress, identity and generators of its `Record`.
            written: what was written into each of its files.
            retention: which checkpoints stay.

        Raises:
            NotAsWritten: a file is missing, or not of the size that was written.
        """
        partial = self.partial(step)
        self._check_sizes(partial, written)
        record = Record(**record_parts, files=dict(sorted(written.items())))
        write_whole(partial / RECORD, json.dumps(asdict(record), indent=1).encode())
        # A damaged or half-deleted folder of this step may be in the way; a whole one is never saved again.
        shutil.rmtree(self.path(step), ignore_errors=True)
        partial.rename(self.path(step))
        write_whole(self.root / LATEST, f"step_{step}\n".encode())
        for old in retention.dropped(self.steps(), step):
            self._drop(old)

    @staticmethod
    def _check_sizes(partial: Path, written: dict[str, Content]) -> None:
        there = {str(p.relative_to(partial)): p.stat().st_size for p in partial.rglob("*") if p.is_file()}
        for name in sorted(there.keys() | written.keys()):
            size = written[name].size if name in written else None
            if there.get(name) != size:
                raise NotAsWritten(f"{name} has {there.get(name, 'no')} bytes on the disk, and {size} were written")

    def _drop(self, step: int) -> None:
        """Remove a checkpoint; killed in the middle of it, none is left that looks whole."""
        going = self.root / f".step_{step}.dropped"
        self.path(step).rename(going)
        shutil.rmtree(going)

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that did not become whole."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def read_record(self, step: int) -> Record:
        """The record of a checkpoint.

        Raises:
            DamagedCheckpoint: the checkpoint is not there or not whole; the line names the file and the way on.
        """
        path = self.path(step) / RECORD
        if not self.path(step).is_dir():
            raise DamagedCheckpoint(str(self.path(step)), "is not there", self._mend(step))
        if not path.is_file():
            raise self.damage(step, RECORD, "is not there, so the checkpoint is not whole")
        try:
            raw = parse_json(read_regular(path))
            files = {relative_name(name, str(path)): Content(**content) for name, content in raw["files"].items()}
            record = Record(**{**raw, "progress": Progress(**raw["progress"]), "files": files})
            _check_types(record)
            return record
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damage(step, RECORD, "cannot be read as a checkpoint's record") from error

    def is_model_only(self, step: int) -> bool:
        """Whether a checkpoint says of itself that it holds a model alone, be it whole or not."""
        try:
            return bool(parse_json(read_regular(self.path(step) / RECORD)).get("model_only"))
        except (OSError, ValueError, AttributeError):
            return False

    def check_file(self, step: int, name: str, expected: Content) -> None:
        """Read a file of a checkpoint and compare it with its record.

        Raises:
            DamagedCheckpoint: it is not what was written.
        """
        path = self.path(step) / name
        if not path.is_file():
            raise self.damage(step, name, "is not there, so the checkpoint is damaged")
        if (size := path.stat().st_size) != expected.size:
            raise self.damage(step, name, f"has {size} bytes instead of {expected.size}, so the checkpoint is damaged")
        try:
            found = content_of(path)
        except OSError as error:
            raise self.damage(step, name, f"cannot be read ({os_reason(error)})") from error
        if found != expected:
            problem = f"has the checksum {found.xxh3_128} instead of {expected.xxh3_128}, so the checkpoint is damaged"
            raise self.damage(step, name, problem)

    def damage(self, step: int, name: str, problem: str) -> DamagedCheckpoint:
        """The error that names a damaged file of a checkpoint, and the others that there are."""
        return DamagedCheckpoint(str(self.path(step) / name), problem, self._mend(step))

    def _mend(self, step: int) -> str:
        others = [str(other) for other in self.steps() if other != step]
        if not others:
            return "there is no other: bring it back from a copy, or train the run until it has written one"
        return f"{self._another} (there are: {', '.join(others)})"


def _check_types(record: Record) -> None:
    """Refuse what a record that was not written here may hold.

    Raises:
        TypeError: a field is of another type, or a number none of a run's.
    """
    if not all(type(number) is int and 0 <= number < _MOST for number in vars(record.progress).values()):
        raise TypeError("progress")
    if type(record.identity) is not dict or type(record.generators) is not list:
        raise TypeError("identity or generators")
    if not all(type(one.size) is int and type(one.xxh3_128) is str for one in record.files.values()):
        raise TypeError("files")
