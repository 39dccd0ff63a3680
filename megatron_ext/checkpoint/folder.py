"""Checkpoints on disk: `step_N/` folders and `latest`, and the record that tells a whole one from a damaged one.

A checkpoint is written beside, as `.step_N.partial`, and renamed when every rank is done; `latest` moves after that.
Whatever happens in between, what was there before stays loadable.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import UserError
from megatron_ext.files import write_whole

RECORD = "checkpoint.json"
LATEST = "latest"


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
        files: size in bytes of every file of the checkpoint.
        model_only: whether it holds the model without optimizer, generators and data position, as conversion writes.
    """

    progress: Progress
    identity: dict[str, Any]
    generators: list[int]
    files: dict[str, int]
    model_only: bool = False


class CheckpointFolder:
    """The `checkpoints/` folder of a run.

    Args:
        root: the folder; made when the first checkpoint is begun.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, once it is whole."""
        return self.root / f"step_{step}"

    def partial(self, step: int) -> Path:
        """Where the checkpoint of a step is written until it is whole."""
        return self.root / f".step_{step}.partial"

    def steps(self) -> list[int]:
        """Steps whose checkpoints are whole, ascending."""
        found = (path.parent.name.removeprefix("step_") for path in self.root.glob(f"step_*/{RECORD}"))
        return sorted(int(step) for step in found if step.isdecimal())  # somebody may keep a step_6.copy there

    def latest(self) -> int | None:
        """Step of the newest checkpoint; None where there is none.

        Raises:
            UserError: `latest` does not name a step.
        """
        pointer = self.root / LATEST
        if not pointer.exists():
            return None
        name = pointer.read_text().strip()
        if not name.removeprefix("step_").isdecimal():
            raise UserError(str(pointer), f"{name!r} names no checkpoint", f"write one of {self._others(-1)} into it")
        return int(name.removeprefix("step_"))

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into."""
        partial = self.partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish(self, step: int, record_parts: dict[str, Any], keep: int) -> None:
        """Make a written checkpoint whole: record, rename, move `latest`, drop what is more than `keep`.

        Args:
            step: of the checkpoint; its state lies in the folder that `begin` gave.
            record_parts: progress, identity and generators of its `Record`.
            keep: newest checkpoints kept; 0: all.
        """
        partial = self.partial(step)
        files = {str(p.relative_to(partial)): p.stat().st_size for p in sorted(partial.rglob("*")) if p.is_file()}
        write_whole(partial / RECORD, json.dumps(asdict(Record(**record_parts, files=files)), indent=1).encode())
        # A damaged or half-deleted folder of this step may be in the way; a whole one is never saved again.
        shutil.rmtree(self.path(step), ignore_errors=True)
        partial.rename(self.path(step))
        write_whole(self.root / LATEST, f"step_{step}\n".encode())
        for old in self.steps()[:-keep] if keep else []:
            shutil.rmtree(self.path(old))

    def abandon(self, step: int) -> None:
        """Remove what was written of a checkpoint that did not become whole."""
        shutil.rmtree(self.partial(step), ignore_errors=True)

    def read_record(self, step: int) -> Record:
        """The record of a checkpoint, after its files were found there and of the right size.

        Raises:
            UserError: the checkpoint is not there or not whole; the line names the file and the way on.
        """
        folder = self.path(step)
        mend = f"name another step, with --from-step to train, --step to generate ({self._others(step)})"
        if not (folder / RECORD).is_file():
            raise UserError(str(folder / RECORD), "is not there, so the checkpoint is not whole", mend)
        try:
            raw = json.loads((folder / RECORD).read_text())
            record = Record(**{**raw, "progress": Progress(**raw["progress"])})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(str(folder / RECORD), "cannot be read as a checkpoint's record", mend) from error
        for name, size in record.files.items():
            self._check_file(folder / name, size, mend)
        return record

    def is_model_only(self, step: int) -> bool:
        """Whether a checkpoint says of itself that it holds a model alone, be it whole or not."""
        try:
            return bool(json.loads((self.path(step) / RECORD).read_text()).get("model_only"))
        except (OSError, ValueError, AttributeError):
            return False

    @staticmethod
    def _check_file(path: Path, size: int, mend: str) -> None:
        if not path.is_file():
            raise UserError(str(path), "is not there, so the checkpoint is damaged", mend)
        if path.stat().st_size != size:
            problem = f"has {path.stat().st_size} bytes instead of {size}, so the checkpoint is damaged"
            raise UserError(str(path), problem, mend)

    def _others(self, step: int) -> str:
        others = [str(other) for other in self.steps() if other != step]
        return "there are: " + ", ".join(others) if others else "there is no other"
