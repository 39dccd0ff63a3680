"""Checkpoints on disk: `step_N/` folders, `latest`, and the record that identifies complete checkpoints.

A checkpoint is written to `.step_N.partial`. The folder is renamed once every rank has written its files and verified
them. `latest` is updated after that. An interruption at any point leaves earlier checkpoints loadable.
"""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.contents import FileDigest, compute_digest
from megatron_ext.checkpoint.disk import NotAsWritten
from megatron_ext.run_folder.layout import parse_step_name, step_name
from megatron_ext.utils.atomic_files import MAX_POINTER_BYTES, os_error_reason, read_regular, write_atomically
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.json_text import parse_json
from megatron_ext.utils.untrusted_paths import check_relative_path

RECORD = "checkpoint.json"
LATEST = "latest"

_MAX_COUNT = 1 << 62
"""Upper bound of the steps, samples and tokens in a record. It leaves room in int64."""


TRAIN_HINT = "choose another step with --from-step"
"""Hint for users of `selectron train` if a checkpoint is unusable."""


class DamagedCheckpoint(UserError):
    """Error for a missing or damaged checkpoint. Another checkpoint may be intact."""


@dataclass(frozen=True)
class Progress:
    """Progress of a run.

    Attributes:
        step: number of completed optimizer steps.
        samples: number of consumed training samples, which is also the index of the next sample in the sample order.
        tokens: number of consumed training tokens.
    """

    step: int = 0
    samples: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class Record:
    """Record of a checkpoint, written beside the state once the state is complete.

    Attributes:
        progress: progress of the run.
        identity: configuration values that a run must share to continue from this checkpoint.
        generators: layout under which the states of the random generators were saved.
        files: size and checksum of every file of the checkpoint.
        model_only: True if the checkpoint contains only the model, without optimizer, generators and data position, as
            written by conversion.
    """

    progress: Progress
    identity: dict[str, Any]
    generators: list[int]
    files: dict[str, FileDigest]
    model_only: bool = False


@dataclass(frozen=True)
class Retention:
    """Rule for which checkpoints are kept.

    Attributes:
        newest: number of newest checkpoints to keep. 0: keep all.
        every: also keep checkpoints whose step is a multiple of this number. 0: keep no others.
    """

    newest: int = 0
    every: int = 0

    def steps_to_remove(self, steps: list[int], step: int) -> list[int]:
        """Return the steps of the checkpoints to remove after a save.

        Args:
            steps: steps of the existing checkpoints, ascending.
            step: step that was saved. Later checkpoints exist if the run was resumed from an earlier step. They do not
                count as newest and are not removed. They are replaced when their step is saved again.
        """
        candidates = [other for other in steps if other <= step]
        old = candidates[: -self.newest] if self.newest else []
        return [other for other in old if not self.every or other % self.every]


class CheckpointFolder:
    """The `checkpoints/` folder of a run.

    Args:
        root: the folder. It is created with the first checkpoint.
        choose_hint: hint in errors. It says how the current command selects another checkpoint.
    """

    def __init__(self, root: Path, choose_hint: str = TRAIN_HINT) -> None:
        self.root, self._choose_hint = root, choose_hint

    def path(self, step: int) -> Path:
        """Return the path of a complete checkpoint."""
        return self.root / step_name(step)

    def partial(self, step: int) -> Path:
        """Return the path of a checkpoint while it is being written."""
        return self.root / f".{step_name(step)}.partial"

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        found = (path.parent.name for path in self.root.glob(f"step_*/{RECORD}"))
        # A user may keep other folders beside the checkpoints, such as step_6.copy.
        return sorted(step for name in found if (step := parse_step_name(name)) is not None)

    def latest(self) -> int | None:
        """Return the step named by `latest`, or None if the file does not exist.

        Raises:
            UserError: `latest` cannot be read or does not name a step.
        """
        pointer = self.root / LATEST
        if not pointer.exists():
            return None
        try:
            name = read_regular(pointer, MAX_POINTER_BYTES).decode(errors="replace").strip()
        except OSError as error:
            raise UserError(
                str(pointer), f"cannot be read ({os_error_reason(error)})", "restore or remove it"
            ) from error
        step = parse_step_name(name)
        if step is None:
            names = ", ".join(step_name(step) for step in self.steps())
            hint = f"write one of these names into it: {names}" if names else "remove it: the folder has no checkpoint"
            raise UserError(str(pointer), f"{name!r} is not a checkpoint", hint)
        return step

    def set_latest(self, step: int) -> None:
        """Set `latest` to an earlier checkpoint from which the run continues.

        The run removes its records of later steps. If it is killed before its next checkpoint, it must not resume from
        a later checkpoint, because its records would have a gap.

        Args:
            step: step of a complete checkpoint.

        Raises:
            OSError: the file cannot be written.
        """
        pointer, content = self.root / LATEST, f"{step_name(step)}\n".encode()
        with suppress(OSError):  # a file that is unreadable or too large is overwritten
            if read_regular(pointer, len(content)) == content:
                return
        write_atomically(pointer, content)

    def create_partial(self, step: int) -> Path:
        """Create an empty folder for the checkpoint of a step, and remove leftovers of killed runs."""
        for leftover in self.root.glob(".step_*"):
            shutil.rmtree(leftover, ignore_errors=True)
        partial = self.partial(step)
        partial.mkdir(parents=True)
        return partial

    def complete(
        self, step: int, record_fields: dict[str, Any], written: dict[str, FileDigest], retention: Retention
    ) -> None:
        """Complete a written checkpoint: write its record, rename the folder, update `latest`, remove old checkpoints.

        Args:
            step: step of the checkpoint, whose state is in the folder `partial(step)`.
            record_fields: progress, identity and generators of its `Record`.
            written: size and checksum of the data written into each file.
            retention: rule for which checkpoints are kept.

        Raises:
            NotAsWritten: a file is missing, unexpected or has another size than was written.
        """
        partial = self.partial(step)
        self._check_sizes(partial, written)
        record = Record(**record_fields, files=dict(sorted(written.items())))
        write_atomically(partial / RECORD, json.dumps(asdict(record), indent=1).encode())
        # An existing folder of this step is damaged or partly deleted, or belongs to steps that were trained again.
        shutil.rmtree(self.path(step), ignore_errors=True)
        partial.rename(self.path(step))
        write_atomically(self.root / LATEST, f"{step_name(step)}\n".encode())
        for old in retention.steps_to_remove(self.steps(), step):
            self._remove(old)

    @staticmethod
    def _check_sizes(partial: Path, written: dict[str, FileDigest]) -> None:
        sizes = {str(p.relative_to(partial)): p.stat().st_size for p in partial.rglob("*") if p.is_file()}
        for name in sorted(sizes.keys() | written.keys()):
            size = written[name].size if name in written else None
            if sizes.get(name) != size:
                raise NotAsWritten(f"{name} has {sizes.get(name, 'no')} bytes on the disk, and {size} were written")

    def _remove(self, step: int) -> None:
        """Remove a checkpoint. Rename the folder first, so that a partly removed checkpoint does not look complete."""
        renamed = self.root / f".{step_name(step)}.dropped"
        self.path(step).rename(renamed)
        shutil.rmtree(renamed)

    def abandon(self, step: int) -> None:
        """Remove an incomplete checkpoint."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def read_record(self, step: int) -> Record:
        """Read the record of a checkpoint.

        Raises:
            DamagedCheckpoint: the checkpoint is missing or incomplete. The message names the file and the alternatives.
        """
        path = self.path(step) / RECORD
        if not self.path(step).is_dir():
            raise DamagedCheckpoint(str(self.path(step)), "does not exist", self._hint(step))
        if not path.is_file():
            raise self.damage_error(step, RECORD, "is missing, so the checkpoint is incomplete")
        try:
            raw = parse_json(read_regular(path))
            files = {
                check_relative_path(name, str(path)): FileDigest(**digest) for name, digest in raw["files"].items()
            }
            record = Record(**{**raw, "progress": Progress(**raw["progress"]), "files": files})
            _check_types(record)
            return record
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise self.damage_error(step, RECORD, "cannot be read as a checkpoint's record") from error

    def is_model_only(self, step: int) -> bool:
        """Return whether a checkpoint's record declares it as model-only. The checkpoint may be damaged."""
        try:
            return bool(parse_json(read_regular(self.path(step) / RECORD)).get("model_only"))
        except (OSError, ValueError, AttributeError):
            return False

    def check_file(self, step: int, name: str, expected: FileDigest) -> None:
        """Read a file of a checkpoint and compare its size and checksum with the checkpoint's record.

        Raises:
            DamagedCheckpoint: the file is missing, unreadable or differs from the record.
        """
        path = self.path(step) / name
        if not path.is_file():
            raise self.damage_error(step, name, "is missing, so the checkpoint is damaged")
        if (size := path.stat().st_size) != expected.size:
            problem = f"has {size} bytes instead of {expected.size}, so the checkpoint is damaged"
            raise self.damage_error(step, name, problem)
        try:
            found = compute_digest(path)
        except OSError as error:
            raise self.damage_error(step, name, f"cannot be read ({os_error_reason(error)})") from error
        if found != expected:
            problem = f"has checksum {found.xxh3_128} instead of {expected.xxh3_128}, so the checkpoint is damaged"
            raise self.damage_error(step, name, problem)

    def damage_error(self, step: int, name: str, problem: str) -> DamagedCheckpoint:
        """Return an error that names a damaged file of a checkpoint, and the other checkpoints."""
        return DamagedCheckpoint(str(self.path(step) / name), problem, self._hint(step))

    def _hint(self, step: int) -> str:
        others = [str(other) for other in self.steps() if other != step]
        if not others:
            return "restore it from a backup, or train the run until it writes a checkpoint"
        return f"{self._choose_hint} (available: {', '.join(others)})"


def _check_types(record: Record) -> None:
    """Check the types of a record's fields, because the record may come from an untrusted file.

    Raises:
        TypeError: a field has another type, or a count is out of range.
    """
    if not all(type(number) is int and 0 <= number < _MAX_COUNT for number in vars(record.progress).values()):
        raise TypeError("progress")
    if type(record.identity) is not dict or type(record.generators) is not list:
        raise TypeError("identity or generators")
    if not all(type(digest.size) is int and type(digest.xxh3_128) is str for digest in record.files.values()):
        raise TypeError("files")
