"""Reading and writing of Hugging Face folders: config.json, safetensors, tokenizer files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from megatron_ext.config.validate import show
from megatron_ext.conversion.core.converted_tensors import ConvertedTensors, to_ours, to_theirs
from megatron_ext.conversion.core.family import Family, HasModelCode, SavedModel
from megatron_ext.conversion.core.formats import CONFIG
from megatron_ext.conversion.core.source import Source, SourceOptions, main_dtype
from megatron_ext.conversion.core.tensors import Tensors
from megatron_ext.conversion.huggingface.families import find_family
from megatron_ext.conversion.huggingface.safetensors_files import SafetensorsTensors, write_safetensors
from megatron_ext.runs.tokenizer_files import StoredTokenizer, find_tokenizer, read_json
from megatron_ext.utils.errors import UserError


def open_folder(path: Path, options: SourceOptions) -> Source:
    """Open the model of a Hugging Face folder.

    Raises:
        UserError: the architecture is unknown, the configuration is not supported, or the folder is damaged.
    """
    if options.model_config is not None:
        raise UserError("--model-config", f"{path / CONFIG} already describes the model", "remove it")
    family, saved = read_model(path)
    stored = SafetensorsTensors(path)
    return Source(
        path=path,
        format="hugging_face",
        saved=saved,
        stored=stored,
        tensors=ConvertedTensors(stored, to_ours(family.rules(saved)), str(path)),
        tokenizer=find_tokenizer(path, options.tokenizer),
        family=family,
    )


def read_model(path: Path) -> tuple[Family, SavedModel]:
    """Return the family of a folder's architecture, and our model that its config.json describes.

    Raises:
        UserError: the architecture is unknown, or the configuration is not supported.
    """
    where = str(path / CONFIG)
    config = read_json(path / CONFIG)
    family = find_family(_architecture(config, where), where)
    return family, family.saved_model(config)


def _architecture(config: dict[str, Any], where: str) -> str:
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        problem = f"architectures is {show(architectures)}, not a list of one name"
        raise UserError(where, problem, "give a folder written by save_pretrained")
    return str(architectures[0])


def family_tensors(family: Family, saved: SavedModel, tensors: Tensors, where: str) -> Tensors:
    """Return our tensors converted to those of the family.

    Args:
        family: the family.
        saved: the model.
        tensors: our tensors.
        where: file or folder to name in error messages.
    """
    return ConvertedTensors(tensors, to_theirs(family.rules(saved)), where)


def write_folder(
    family: Family,
    saved: SavedModel,
    tensors: Tensors,
    tokenizer: StoredTokenizer | None,
    folder: Path,
    shard_bytes: int,
) -> None:
    """Write a model without its tokenizer's files.

    Args:
        family: family of the architecture to write.
        saved: the model.
        tensors: the family's tensors.
        tokenizer: tokenizer that determines the special token ids; None: they are not known.
        folder: existing folder.
        shard_bytes: maximum bytes of a safetensors file, see `write_safetensors`.

    Raises:
        OSError: writing fails.
    """
    config = {**family.config(saved), "dtype": str(main_dtype(tensors.infos().values())).removeprefix("torch.")}
    begin, end = (None, None) if tokenizer is None else (tokenizer.begin_id, tokenizer.end_id)
    # Without these fields transformers would use Llama's default ids. In our data the token that ends a document also
    # begins the next one.
    config |= {"bos_token_id": end if begin is None else begin, "eos_token_id": end, "pad_token_id": None}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(tensors, folder, shard_bytes)
    for file in family.code if isinstance(family, HasModelCode) else ():
        shutil.copyfile(file, folder / file.name)
