"""What a folder is: by which files each form of a checkpoint is known."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from megatron_ext.checkpoint.folder import LATEST, RECORD
from megatron_ext.checkpoint.metadata_index import FILE_NAME as METADATA
from megatron_ext.errors import UserError

Form = Literal["universal", "run", "step", "hugging_face", "plain_megatron"]

CHECKPOINTS = "checkpoints"
"""Folder of a run of ours."""

CONFIG = "config.json"
"""Of a Hugging Face folder."""

UNIVERSAL, ZERO = "latest_universal", "zero"
"""The file that names DeepSpeed's newest universal checkpoint, and the folder of one's tensors."""

PLAIN = "latest_checkpointed_iteration.txt"
"""The file that names Megatron-LM's newest checkpoint."""

_OF_DEEPSPEED = "*_model_states.pt"
"""Files of all DeepSpeed's checkpoints; universal ones have them, too."""


def form_of(path: Path) -> Form:
    """The form of a folder.

    Raises:
        UserError: it is none, or of a form that is not read.
    """
    if not path.is_dir():
        problem = "is no folder" if path.exists() else "is not there"
        raise UserError(str(path), problem, "give the folder of a run, of a checkpoint or of a Hugging Face model")
    # Before runs: DeepSpeed, too, keeps a file `latest` for its other checkpoints.
    if (path / UNIVERSAL).is_file() or (path / ZERO).is_dir():
        return "universal"
    if any(path.glob(_OF_DEEPSPEED)) or any(path.glob(f"*/{_OF_DEEPSPEED}")):
        problem = "is a checkpoint of DeepSpeed's that only the layout which wrote it can read"
        mend = "make it universal by `python -m deepspeed.checkpoint.ds_to_universal`, and give that"
        raise UserError(str(path), problem, mend)
    if (path / CHECKPOINTS).is_dir() or (path / LATEST).is_file():
        return "run"
    if (path / RECORD).is_file():
        return "step"
    if (path / CONFIG).is_file():
        return "hugging_face"
    if (path / PLAIN).is_file() or (path / METADATA).is_file():
        return "plain_megatron"
    problem = (
        f"is no checkpoint: there is no {RECORD} or {CHECKPOINTS}/ (ours), no {CONFIG} (Hugging Face), "
        f"no {UNIVERSAL} or {ZERO}/ (DeepSpeed), and no {METADATA} (Megatron's torch_dist)"
    )
    raise UserError(str(path), problem, "give a folder that holds one of them")
