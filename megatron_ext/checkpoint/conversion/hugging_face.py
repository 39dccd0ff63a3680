"""Folders in Hugging Face's form: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.conversion.families import family_of_architecture
from megatron_ext.checkpoint.conversion.family import Family, SavedModel, ShipsCode
from megatron_ext.checkpoint.conversion.forms import CONFIG
from megatron_ext.checkpoint.conversion.made import Made, to_ours, to_theirs
from megatron_ext.checkpoint.conversion.safetensors_files import SafetensorsTensors, write_safetensors
from megatron_ext.checkpoint.conversion.source import Source, SourceOptions, main_dtype
from megatron_ext.checkpoint.conversion.tensors import Tensors
from megatron_ext.checkpoint.conversion.tokenizer_files import KeptTokenizer, kept_tokenizer, read_json
from megatron_ext.config.validate import show
from megatron_ext.errors import UserError


def open_folder(path: Path, options: SourceOptions) -> Source:
    """The model of a folder.

    Raises:
        UserError: its architecture is not known, its configuration says what ours cannot express, or it is damaged.
    """
    if options.model_config is not None:
        raise UserError("--model-config", f"{path / CONFIG} tells the model already", "leave it out")
    family, saved = read_model(path)
    stored = SafetensorsTensors(path)
    return Source(
        path=path,
        format="hugging_face",
        saved=saved,
        stored=stored,
        tensors=Made(stored, to_ours(family.rules(saved)), str(path)),
        tokenizer=kept_tokenizer(path, options.tokenizer),
        family=family,
    )


def read_model(path: Path) -> tuple[Family, SavedModel]:
    """The architecture of a folder, and the model of ours that its config.json describes.

    Raises:
        UserError: its architecture is not known, or its configuration says what ours cannot express.
    """
    where = str(path / CONFIG)
    config = read_json(path / CONFIG)
    family = family_of_architecture(_architecture(config, where), where)
    return family, family.saved_model(config)


def _architecture(config: dict[str, Any], where: str) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        problem = f"architectures is {show(architectures)}, and names no model"
        raise UserError(where, problem, "give a folder that save_pretrained wrote")
    return str(architectures[0])


def theirs(family: Family, saved: SavedModel, tensors: Tensors, where: str) -> Tensors:
    """Our tensors as the family's."""
    return Made(tensors, to_theirs(family.rules(saved)), where)


def write_folder(
    family: Family, saved: SavedModel, tensors: Tensors, tokenizer: KeptTokenizer | None, folder: Path, shard_bytes: int
) -> None:
    """Write a model, but for its tokenizer's files.

    Args:
        family: its architecture's.
        saved: the model.
        tensors: the family's.
        tokenizer: whose tokens it knows; None: not known.
        folder: exists.
        shard_bytes: see `write_safetensors`.

    Raises:
        OSError: the disk refuses.
    """
    config = {**family.config(saved), "dtype": str(main_dtype(tensors.infos().values())).removeprefix("torch.")}
    begin, end = (None, None) if tokenizer is None else (tokenizer.begin_id, tokenizer.end_id)
    # Absent, transformers would take a Llama's own numbers. In our data what ends a document begins the next.
    config |= {"bos_token_id": end if begin is None else begin, "eos_token_id": end, "pad_token_id": None}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(tensors, folder, shard_bytes)
    for file in family.code if isinstance(family, ShipsCode) else ():
        shutil.copyfile(file, folder / file.name)
