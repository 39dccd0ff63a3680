"""Detection of a checkpoint's format from the files in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron_ext.checkpoint.folder import LATEST, RECORD
from megatron_ext.checkpoint.metadata_index import FILE_NAME as METADATA
from megatron_ext.run_folder.layout import CHECKPOINTS
from megatron_ext.utils.errors import UserError

FolderFormat = Literal["universal", "run", "step", "hugging_face", "plain_megatron"]


CONFIG = "config.json"
"""Configuration file of a Hugging Face folder."""

UNIVERSAL, ZERO = "latest_universal", "zero"
"""File with the name of DeepSpeed's newest universal checkpoint, and the folder with the tensors of one."""

MEGATRON_LATEST = "latest_checkpointed_iteration.txt"
"""File with the iteration of Megatron-LM's newest checkpoint."""

_DEEPSPEED_STATES = "*_model_states.pt"
"""Pattern of a file that every DeepSpeed checkpoint contains, universal ones included."""


def detect_format(path: Path) -> FolderFormat:
    """Return the checkpoint format of a folder.

    Raises:
        UserError: the folder does not exist, is no checkpoint, or has an unsupported format.
    """
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        raise UserError(str(path), problem, "give the folder of a run, of a checkpoint or of a Hugging Face model")
    # Checked before runs, because DeepSpeed also writes a file `latest` for its other checkpoints.
    if (path / UNIVERSAL).is_file() or (path / ZERO).is_dir():
        return "universal"
    if any(path.glob(_DEEPSPEED_STATES)) or any(path.glob(f"*/{_DEEPSPEED_STATES}")):
        problem = "is a DeepSpeed checkpoint that only loads under its own parallel layout"
        hint = "convert it with `python -m deepspeed.checkpoint.ds_to_universal`, and give the result"
        raise UserError(str(path), problem, hint)
    if (path / CHECKPOINTS).is_dir() or (path / LATEST).is_file():
        return "run"
    if (path / RECORD).is_file():
        return "step"
    if (path / CONFIG).is_file():
        return "hugging_face"
    if (path / MEGATRON_LATEST).is_file() or (path / METADATA).is_file():
        return "plain_megatron"
    problem = (
        f"is no checkpoint: there is no {RECORD} or {CHECKPOINTS}/ (ours), no {CONFIG} (Hugging Face), "
        f"no {UNIVERSAL} or {ZERO}/ (DeepSpeed), and no {METADATA} (Megatron's torch_dist)"
    )
    raise UserError(str(path), problem, "give a folder that contains one of them")
