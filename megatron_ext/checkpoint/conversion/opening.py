"""Opening a checkpoint: what a folder is, and the reader of that form."""

from __future__ import annotations

from pathlib import Path

from megatron_ext.checkpoint.conversion import hugging_face, plain_gpt, selectron_run, universal
from megatron_ext.checkpoint.conversion.our_model import expected_tensors
from megatron_ext.checkpoint.conversion.source import Source, SourceOptions
from megatron_ext.checkpoint.conversion.tensors import check_shapes
from megatron_ext.checkpoint.folder import RECORD
from megatron_ext.checkpoint.metadata_file import FILE_NAME as METADATA
from megatron_ext.errors import UserError

_OF_DEEPSPEED = "*_model_states.pt"
"""Files of all DeepSpeed's checkpoints; universal ones have them, too."""


def open_source(path: Path, options: SourceOptions) -> Source:
    """Open a run's folder (its newest checkpoint), a checkpoint of it, a Hugging Face folder, or one of the others.

    The others are DeepSpeed's universal checkpoints and plain Megatron's.

    Raises:
        UserError: it is none of them, damaged, or holds what no model of ours has.
    """
    source = _open(path, options)
    check_shapes(expected_tensors(source.saved), source.tensors.infos(), str(source.path))
    return source


def _open(path: Path, options: SourceOptions) -> Source:
    if not path.is_dir():
        problem = "is no folder" if path.exists() else "is not there"
        raise UserError(str(path), problem, "give the folder of a run, of a checkpoint or of a Hugging Face model")
    if universal.is_universal(path):  # before runs: DeepSpeed, too, keeps a file `latest` for its other checkpoints
        return universal.open_folder(path, options)
    if any(path.glob(_OF_DEEPSPEED)) or any(path.glob(f"*/{_OF_DEEPSPEED}")):
        problem = "is a checkpoint of DeepSpeed's that only the layout which wrote it can read"
        mend = "make it universal by `python -m deepspeed.checkpoint.ds_to_universal`, and give that"
        raise UserError(str(path), problem, mend)
    if selectron_run.is_run(path):
        return selectron_run.open_run(path, options)
    if (path / RECORD).is_file():
        return selectron_run.open_step(path, options)
    if (path / hugging_face.CONFIG).is_file():
        return hugging_face.open_folder(path, options)
    if (path / plain_gpt.NEWEST).is_file() or (path / METADATA).is_file():
        return plain_gpt.open_folder(path, options)
    problem = (
        f"is no checkpoint: there is no {RECORD} or checkpoints/ (ours), no {hugging_face.CONFIG} (Hugging Face), "
        f"no {universal.NEWEST} or {universal.ZERO}/ (DeepSpeed), and no {METADATA} (Megatron's torch_dist)"
    )
    raise UserError(str(path), problem, "give a folder that holds one of them")
