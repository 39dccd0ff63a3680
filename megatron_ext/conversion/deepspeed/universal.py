"""Reading of DeepSpeed's universal checkpoints, ours and others', one tensor at a time.

`latest_universal` contains the name of the checkpoint's folder. `zero/<parameter>/{fp32, exp_avg, exp_avg_sq, step}.pt`
there are the unsharded tensors of a parameter, see deepspeed.checkpoint.ds_to_universal. A further file, written only
by Selectron, contains the values that DeepSpeed's files lack.
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
    Changed,
    Joined,
    Listed,
    TensorInfo,
    Tensors,
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
PRECISE = "fp32"
"""Stem of the file with a parameter's fp32 values. The files of the moments are named after the moments."""

_MEND = "copy the whole checkpoint again, or give another one"


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
        return _ours(path, options, _description(path), tokenizer)
    if options.model_config is None:
        problem = f"contains no {DESCRIPTION}, and DeepSpeed's files do not contain the model's sizes"
        raise UserError(str(path), problem, "give them in a YAML file with --model-config (its `model` section)")
    stored = _kind(path, PRECISE)
    tokens = _rows(path, stored, options.model_config) if tokenizer is None else tokenizer.size
    saved = configured_model(options.model_config, tokens)
    tensors = without_padding(_in_shape(stored, saved), saved.vocab_size)
    has_optimizer = bool(_kind(path, MOMENTS[0]).infos())
    return _source(path, saved, stored, tensors, tokenizer=tokenizer, has_optimizer=has_optimizer)


def _rows(path: Path, stored: Tensors, model_config: Path) -> int:
    """Return the number of rows of the embedding, which is flat if DeepSpeed converted it from ZeRO-3."""
    info = stored.infos().get(VOCABULARY[0])
    if info is None:
        problem = f"contains no {VOCABULARY[0]}, so it is not a GPTModel of megatron-core"
        raise UserError(str(path / ZERO), problem, "give a checkpoint of one")
    return info.num_elements // configured_model(model_config, 1).model.hidden_size


def _newest(path: Path) -> Path:
    tag = read_pointer(path / NEWEST)
    folder = path_within(path, tag, str(path / NEWEST), follow_links=True)
    if not (folder / ZERO).is_dir():
        raise UserError(str(path / NEWEST), f"names {tag!r}, but {folder / ZERO} does not exist", _MEND)
    return folder


def _source(path: Path, saved: SavedModel, stored: Tensors, tensors: Tensors, **known: Any) -> Source:
    return Source(path=path, format="deepspeed_universal", saved=saved, stored=stored, tensors=tensors, **known)


def _ours(path: Path, options: SourceOptions, said: Description, tokenizer: Any) -> Source:
    _check_files(path, said.files)
    stored = _kind(path, PRECISE)
    saved = saved_model(said.identity, str(path / DESCRIPTION))
    if options.model_config is not None:
        saved = configured_model(options.model_config, saved.vocab_size)
    check_keys(said.dtypes, stored.infos(), str(path))
    tensors = Changed(stored, lambda key, tensor: tensor.to(getattr(torch, said.dtypes[key])))
    training = None if said.schedule is None else _training(path, said, stored, tensors)
    return _source(
        path,
        saved,
        stored,
        without_padding(tensors, saved.vocab_size),
        tokenizer=tokenizer,
        progress=said.progress,
        has_optimizer=training is not None,
        training=training,
    )


def _training(path: Path, said: Description, stored: Tensors, tensors: Tensors) -> Training:
    assert said.schedule is not None
    moments = {f"{moment}.": _kind(path, moment) for moment in MOMENTS}
    # A parameter without moments is not trained, so the optimizer has no fp32 values of it.
    trained = {key: info for key, info in stored.infos().items() if key in moments[f"{MOMENTS[0]}."].infos()}
    state = Joined({"param.": Listed(trained, stored.read), **moments})
    return Training(
        tensors=tensors,
        optimizer=OptimizerState(state, said.schedule),
        identity=said.identity,
        config=said.config,
    )


def _description(path: Path) -> Description:
    file = path / DESCRIPTION
    raw = read_json(file)
    try:
        progress = None if raw["progress"] is None else Progress(**raw["progress"])
        files = {name: FileDigest(**content) for name, content in raw["files"].items()}
        unknown = [name for name in raw["dtypes"].values() if not isinstance(getattr(torch, name, None), torch.dtype)]
        if unknown or (raw["schedule"] is not None and not isinstance(raw["schedule"]["num_steps"], int)):
            raise ValueError("its dtypes or its schedule are none")
        return Description(**{**raw, "progress": progress, "files": files})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise UserError(str(file), f"is not a description of a checkpoint ({error})", _MEND) from None


def _check_files(path: Path, files: Mapping[str, FileDigest]) -> None:
    for name, expected in files.items():
        file = path_within(path, name, str(path / DESCRIPTION), follow_links=True)
        if not file.is_file():
            raise UserError(str(file), "is missing, so the checkpoint is damaged", _MEND)
        if file.stat().st_size != expected.size or compute_digest(file) != expected:
            raise UserError(str(file), "differs from what was written, so the checkpoint is damaged", _MEND)


def _kind(path: Path, kind: str) -> Tensors:
    """Return the tensors of one kind by our keys, for all parameters that have them. Their data is read on access."""
    files: dict[str, Path] = {}
    for file in sorted((path / ZERO).glob(f"*/{kind}.pt")):
        files[file.parent.name.removeprefix("module.")] = file  # prefix of an engine around Megatron's bf16 wrapper
    if not files and kind == PRECISE:
        raise UserError(str(path / ZERO), f"contains no {kind}.pt of any parameter", _MEND)
    infos = {}
    for key, file in files.items():
        tensor = _tensor(file)
        infos[key] = TensorInfo(tuple(tensor.shape), tensor.dtype)
    return Listed(infos, lambda key: _tensor(files[key]))


def _tensor(file: Path) -> Tensor:
    """Return a parameter's tensor, memory-mapped. No code in the file is executed."""
    try:
        content = load_file(file, on_disk=True)
    except RefusedPickle as error:
        raise UserError(str(file), f"cannot be read: it {error}", _MEND) from error
    except OSError as error:
        raise UserError(str(file), f"cannot be read ({os_error_reason(error)})", _MEND) from error
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, Tensor):
        raise UserError(str(file), "contains no tensor", _MEND)
    return tensor


def _in_shape(stored: Tensors, saved: SavedModel) -> Tensors:
    """Return the tensors in the shapes of the model. DeepSpeed flattens those converted from ZeRO-3."""
    if not _flat(stored.infos().values()):
        return stored
    expected = expected_tensors(saved)

    def shaped(key: str, tensor: Tensor) -> Tensor:
        inner = expected[key].shape[1:] if key in expected else ()
        fits = tensor.dim() == 1 and tensor.numel() % max(1, math.prod(inner)) == 0
        return tensor.view(-1, *inner) if inner and fits else tensor

    return Changed(stored, shaped)


def _flat(infos: Iterable[TensorInfo]) -> bool:
    return all(len(info.shape) == 1 for info in infos)
