"""Opening of a checkpoint of any supported format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_ext.conversion.core import selectron_run
from megatron_ext.conversion.core.formats import FolderFormat, detect_format
from megatron_ext.conversion.core.our_model import expected_tensors
from megatron_ext.conversion.core.source import Source, SourceOptions
from megatron_ext.conversion.core.tensors import check_shapes
from megatron_ext.conversion.deepspeed import universal
from megatron_ext.conversion.huggingface import folder as hugging_face
from megatron_ext.conversion.megatron import gpt

_READERS: Mapping[FolderFormat, Callable[[Path, SourceOptions], Source]] = {
    "universal": universal.open_folder,
    "run": selectron_run.open_run,
    "step": selectron_run.open_step,
    "hugging_face": hugging_face.open_folder,
    "plain_megatron": gpt.open_folder,
}


def open_source(path: Path, options: SourceOptions) -> Source:
    """Open a checkpoint and check the shapes of its tensors.

    Args:
        path: folder of a run (its newest checkpoint is opened), one checkpoint of a run, a Hugging Face folder, a
            DeepSpeed universal checkpoint, or a plain Megatron checkpoint.
        options: information from the user.

    Raises:
        UserError: the folder is no supported checkpoint, is damaged, or contains a model that ours cannot express.
    """
    source = _READERS[detect_format(path)](path, options)
    check_shapes(expected_tensors(source.saved), source.tensors.infos(), str(source.path))
    return source
