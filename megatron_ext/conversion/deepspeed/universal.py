"""Reader of DeepSpeed's universal checkpoints, written by Selectron or DeepSpeed, one tensor at a time.

`latest_universal` contains the name of the checkpoint's folder. Its files
`zero/<parameter>/{fp32, exp_avg, exp_avg_sq, step}.pt` contain the unsharded tensors of a parameter, see
deepspeed.checkpoint.ds_to_universal. Selectron adds a file with the values that DeepSpeed's files lack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.checkpoint.contents import FileDigest, compute_digest
from megatron_ext.checkpoint.extent import RefusedPickle
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.torch_file import load_file
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.core.formats import UNIVERSAL, ZERO
from megatron_ext.conversion.core.our_model import expected_tensors
from megatron_ext.conversion.core.saved_model import configured_model, saved_model
from megatron_ext.conversion.core.source import Source, SourceOptions, Training
from megatron_ext.conversion.core.tensors import (
    VOCABULARY,
    CombinedTensors,
    LazyTensors,
    TensorInfo,
    Tensors,
    TransformedTensors,
    check_keys,
    without_padding,
)
from megatron_ext.conversion.megatron.torch_dist import OptimizerState
from megatron_ext.optim.algorithms.adamw import MOMENTS
from megatron_ext.runs.tokenizer_files import find_tokenizer, read_json, read_pointer
from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import path_within

NEWEST = UNIVERSAL
DESCRIPTION = "selectron.json"
FP32 = "fp32"
"""Stem of the file with a parameter's fp32 values. The files of the moments are named after the moments."""

_HINT = "copy the whole checkpoint again, or give another one"


@dataclass(frozen=True, kw_only=True)
class Description:
    """Contents of Selectron's own file in a universal checkpoint.

    Attributes:
        identity: identity of the model, or of the run if the source is one, see `folder.Record`.
        dtypes: dtype of each tensor in the model, by our key.
        progress: progress of the training; None: not known.
        schedule: state of the learning-rate schedule; None: there is no optimizer state and all moments are zero.
        config: configuration of the run as plain values; None: not available.
        files: size and checksum of the other files, by name.
    """

    identity: dict[str, Any]
    dtypes: dict[str, str]
    progress: Progress | None
    schedule: dict[str, Any] | None
    config: dict[str, Any] | None
    files: dict[str, FileDigest]


def open_folder(path: Path, options: SourceOptions) -> Source:
    """Open the model of a universal checkpoint.

    Raises:
        UserError: the checkpoint is damaged, or does not contain the model's sizes.
    """
    root, path = (path, _newest(path)) if (path / NEWEST).is_file() else (path.resolve().parent, path)
    tokenizer = find_tokenizer(root, options.tokenizer)
    if (path / DESCRIPTION).is_file():
        return _open_ours(path, options, _read_description(path), tokenizer)
    if options.model_config is None:
        problem = f"contains no {DESCRIPTION}, and DeepSpeed's files do not contain the model's sizes"
        raise UserError(str(path), problem, "give them in a YAML file with --model-config (its `model` section)")
    stored = _tensors_of_kind(path, FP32)
    tokens = _num_embedding_rows(path, stored, options.model_config) if tokenizer is None else tokenizer.size
    saved = configured_model(options.model_config, tokens)
    tensors = without_padding(_in_model_shapes(stored, saved), saved.vocab_size)
    has_optimizer = bool(_tensors_of_kind(path, MOMENTS[0]).infos())
    return _source(path, saved, stored, tensors, tokenizer=tokenizer, has_optimizer=has_optimizer)


def _num_embedding_rows(path: Path, stored: Tensors, model_config: Path) -> int:
    """Return the number of rows of the embedding, which is flat if DeepSpeed converted it from ZeRO-3."""
    info = stored.infos().get(VOCABULARY[0])
    if info is None:
        problem = f"contains no {VOCABULARY[0]}, so it is not a GPTModel of megatron-core"
        raise UserError(str(path / ZERO), problem, "give a checkpoint of a GPTModel")
    return info.num_elements // configured_model(model_config, 1).model.hidden_size


def _newest(path: Path) -> Path:
    tag = read_pointer(path / NEWEST)
    folder = path_within(path, tag, str(path / NEWEST), follow_links=True)
    if not (folder / ZERO).is_dir():
        raise UserError(str(path / NEWEST), f"names {tag!r}, but {folder / ZERO} does not exist", _HINT)
    return folder


def _source(path: Path, saved: SavedModel, stored: Tensors, tensors: Tensors, **fields: Any) -> Source:
    return Source(path=path, format="deepspeed_universal", saved=saved, stored=stored, tensors=tensors, **fields)


def _open_ours(path: Path, options: SourceOptions, description: Description, tokenizer: Any) -> Source:
    _check_files(path, description.files)
    stored = _tensors_of_kind(path, FP32)
    saved = saved_model(description.identity, str(path / DESCRIPTION))
    if options.model_config is not None:
        saved = configured_model(options.model_config, saved.vocab_size)
    check_keys(description.dtypes, stored.infos(), str(path))
    tensors = TransformedTensors(stored, lambda key, tensor: tensor.to(getattr(torch, description.dtypes[key])))
    training = None if description.schedule is None else _training(path, description, stored, tensors)
    return _source(
        path,
        saved,
        stored,
        without_padding(tensors, saved.vocab_size),
        tokenizer=tokenizer,
        progress=description.progress,
        has_optimizer=training is not None,
        training=training,
    )


def _training(path: Path, description: Description, stored: Tensors, tensors: Tensors) -> Training:
    assert description.schedule is not None
    moments = {f"{moment}.": _tensors_of_kind(path, moment) for moment in MOMENTS}
    # A parameter without moments is not trained, so the optimizer has no fp32 values of it.
    trained = {key: info for key, info in stored.infos().items() if key in moments[f"{MOMENTS[0]}."].infos()}
    state = CombinedTensors({"param.": LazyTensors(trained, stored.read), **moments})
    return Training(
        tensors=tensors,
        optimizer=OptimizerState(state, description.schedule),
        identity=description.identity,
        config=description.config,
    )


def _read_description(path: Path) -> Description:
    file = path / DESCRIPTION
    raw = read_json(file)
    try:
        progress = None if raw["progress"] is None else Progress(**raw["progress"])
        files = {name: FileDigest(**digest) for name, digest in raw["files"].items()}
        unknown = [name for name in raw["dtypes"].values() if not isinstance(getattr(torch, name, None), torch.dtype)]
        if unknown or (raw["schedule"] is not None and not isinstance(raw["schedule"]["num_steps"], int)):
            raise ValueError("invalid dtypes or schedule")
        return Description(**{**raw, "progress": progress, "files": files})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(str(file), f"is not a description of a checkpoint ({error})", _HINT) from None


def _check_files(path: Path, files: Mapping[str, FileDigest]) -> None:
    for name, expected in files.items():
        file = path_within(path, name, str(path / DESCRIPTION), follow_links=True)
        if not file.is_file():
            raise UserError(str(file), "is missing, so the checkpoint is damaged", _HINT)
        if file.stat().st_size != expected.size or compute_digest(file) != expected:
            raise UserError(str(file), "differs from what was written, so the checkpoint is damaged", _HINT)


def _tensors_of_kind(path: Path, kind: str) -> Tensors:
    """Return the tensors of one kind by our keys, for all parameters that have them. Their data is read lazily."""
    files: dict[str, Path] = {}
    for file in sorted((path / ZERO).glob(f"*/{kind}.pt")):
        files[file.parent.name.removeprefix("module.")] = file  # prefix of an engine around Megatron's bf16 wrapper
    if not files and kind == FP32:
        raise UserError(str(path / ZERO), f"contains no {kind}.pt of any parameter", _HINT)
    infos = {}
    for key, file in files.items():
        tensor = _tensor(file)
        infos[key] = TensorInfo(tuple(tensor.shape), tensor.dtype)
    return LazyTensors(infos, lambda key: _tensor(files[key]))


def _tensor(file: Path) -> Tensor:
    """Return a parameter's tensor, memory-mapped. No code in the file is executed."""
    try:
        loaded = load_file(file, on_disk=True)
    except RefusedPickle as error:
        raise UserError(str(file), f"cannot be read: it {error}", _HINT) from error
    except OSError as error:
        raise UserError(str(file), f"cannot be read ({os_error_reason(error)})", _HINT) from error
    tensor = loaded.get("param") if isinstance(loaded, dict) else loaded
    if not isinstance(tensor, Tensor):
        raise UserError(str(file), "contains no tensor", _HINT)
    return tensor


def _in_model_shapes(stored: Tensors, saved: SavedModel) -> Tensors:
    """Return the tensors in the shapes of the model. DeepSpeed's converter flattens tensors of ZeRO-3 checkpoints."""
    if not _are_flat(stored.infos().values()):
        return stored
    expected = expected_tensors(saved)

    def reshape(key: str, tensor: Tensor) -> Tensor:
        inner = expected[key].shape[1:] if key in expected else ()
        fits = tensor.dim() == 1 and tensor.numel() % max(1, math.prod(inner)) == 0
        return tensor.view(-1, *inner) if inner and fits else tensor

    return TransformedTensors(stored, reshape)


def _are_flat(infos: Iterable[TensorInfo]) -> bool:
    return all(len(info.shape) == 1 for info in infos)
