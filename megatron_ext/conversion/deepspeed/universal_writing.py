"""Writing of DeepSpeed's universal checkpoints, one tensor at a time.

The files are those that `DeepSpeedEngine.load_checkpoint` reads with `"checkpoint": {"load_universal": true}` at
ZeRO-1, 2 and 3. See deepspeed.checkpoint.universal_checkpoint, runtime.base_optimizer and runtime.zero.stage3.
DeepSpeed itself is not imported, which would take longer than the conversion of a small model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from megatron_ext.checkpoint.contents import CheckedFile, FileDigest
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.conversion.core.formats import ZERO
from megatron_ext.conversion.core.our_model import Split, splits
from megatron_ext.conversion.core.saved_model import identity_of, shape_of
from megatron_ext.conversion.core.source import Source
from megatron_ext.conversion.core.tensors import VOCABULARY, Changed, TensorInfo, Tensors
from megatron_ext.conversion.deepspeed.universal import DESCRIPTION, NEWEST, PRECISE, Description
from megatron_ext.optim.algorithms.adamw import MOMENTS
from megatron_ext.utils.atomic_files import write_atomically

_FORMAT = 0.2
"""DeepSpeed's version number of this format. From 0.4 on there are further fields for uneven shards."""

_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Two names of the same contents. An engine at ZeRO-3 looks for the second name."""


def tag_of(source: Source) -> str:
    """Return the name of the checkpoint's folder, in DeepSpeed's convention."""
    return f"global_step{(source.progress or Progress()).step}"


def num_bytes(source: Source) -> int:
    """Return the bytes of the tensors that will be written."""
    tensors = _tensors(source)
    state = {} if source.training is None else source.training.optimizer.tensors.infos()
    moments = sum(info.num_bytes for key, info in state.items() if not key.startswith("param."))
    return 4 * tensors.num_elements + moments


def write_universal(source: Source, precision: str, folder: Path) -> None:
    """Write a universal checkpoint.

    Parameters have the names in `named_parameters` of our model. The vocabulary is padded: DeepSpeed's loader pads it
    at ZeRO-1 and 2, but at ZeRO-3 it silently loads shorter tensors to a wrong offset.

    Args:
        source: checkpoint to convert.
        precision: precision of a resumed run, used if the source contains no training state.
        folder: existing folder, in which `latest_universal` and a subfolder with all other files are written.

    Raises:
        OSError: writing fails.
        RuntimeError: writing fails in torch.
    """
    tag, steps = tag_of(source), _steps(source)
    (folder / tag / ZERO).mkdir(parents=True)
    files, split, tensors = _Files(folder / tag), splits(source.saved), _tensors(source)
    infos = tensors.infos()
    for key in infos:
        for kind, tensor in _kinds(source, tensors, key):
            files.save(f"{ZERO}/{key}/{kind}.pt", {"param": tensor, **_how_it_splits(key, split[key])})
        files.save(f"{ZERO}/{key}/step.pt", torch.tensor(float(steps)))
    files.save(f"{ZERO}/optimizer_state.pt", _optimizer_state(steps, len(infos)))
    for name in _MODEL_STATES:
        files.save(name, _model_states(source, infos, split))
    text = json.dumps(asdict(_description(source, precision, files.written)), indent=1)
    write_atomically(folder / tag / DESCRIPTION, text.encode())
    write_atomically(folder / NEWEST, tag.encode())


class _Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written: dict[str, FileDigest] = {}

    def save(self, name: str, content: Any) -> None:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        with CheckedFile(path) as file:
            torch.save(content, cast(Any, file))
        self.written[name] = file.digest


def _tensors(source: Source) -> Tensors:
    """Return the tensors of the model with vocabulary padding: the trained padding rows, or zeros."""
    if source.training is not None:
        return source.training.tensors
    rows = shape_of(source.saved).padded_vocab_size

    def padded(key: str, tensor: Tensor) -> Tensor:
        return functional.pad(tensor, (0, 0, 0, rows - len(tensor))) if key in VOCABULARY else tensor

    return Changed(source.tensors, padded)


def _steps(source: Source) -> int:
    return 0 if source.training is None else int(source.training.optimizer.schedule["num_steps"])


def _kinds(source: Source, tensors: Tensors, key: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter by kind.

    Each tensor has its own storage, because torch saves the whole storage of a view.
    """
    if source.training is None:
        yield PRECISE, _alone(tensors.read(key).float())
        shape = tensors.infos()[key].shape
        for moment in MOMENTS:  # ZeRO-3 requires the moments. An expanded zero stores a single element.
            yield moment, torch.zeros(()).expand(shape)
        return
    state = source.training.optimizer.tensors
    is_there = f"param.{key}" in state.infos()
    precise = state.read(f"param.{key}") if is_there else tensors.read(key).float()
    yield PRECISE, _alone(precise)
    for moment in MOMENTS if is_there else ():
        yield moment, _alone(state.read(f"{moment}.{key}"))


def _alone(tensor: Tensor) -> Tensor:
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if whole else tensor.clone(memory_format=torch.contiguous_format)


def _how_it_splits(key: str, split: Split) -> dict[str, Any]:
    """Return the fields from which DeepSpeed's loader takes a tensor-parallel rank's shard of a parameter.

    The loader gives a replicated parameter to each rank unchanged, because the shapes are equal.
    """
    how: dict[str, Any] = {"cat_dim": split.dim or 0}
    if split.parts > 1:
        how["param_n_sub_params"] = split.parts
    if key in VOCABULARY:
        how["vocab_tensor"] = True  # the loader may pad it further
    return how


def _optimizer_state(steps: int, groups: int) -> dict[str, Any]:
    """Return the optimizer state that belongs to no single parameter.

    Learning rates, betas and similar values are left to the engine, because they may have changed. DeepSpeed silently
    loads only as many parameter groups as both sides have. There is one group per parameter, and no engine has more.
    """
    empty: list[dict[str, Any]] = [{"params": []} for _ in range(groups)]
    of_zero3 = {"state": {0: {"step": torch.tensor(float(steps))}}, "param_groups": empty[:1]}
    return {"ds_version": version("deepspeed"), "param_groups": empty, "optimizer_state_dict": of_zero3}


def _model_states(source: Source, infos: Mapping[str, TensorInfo], split: Mapping[str, Split]) -> dict[str, Any]:
    progress = source.progress or Progress()
    return {
        "module": {},  # the weights are in zero/
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": progress.step,
        "global_samples": progress.samples,
        "skipped_steps": 0,
        "lr_scheduler": None,
        "ds_version": version("deepspeed"),
        "param_shapes": [{key: torch.Size(info.shape) for key, info in infos.items()}],
        "universal_checkpoint_info": _patterns(source, infos, split),
    }


def _patterns(source: Source, infos: Mapping[str, TensorInfo], split: Mapping[str, Split]) -> dict[str, Any]:
    """Return the fields of `_how_it_splits` as the patterns that DeepSpeed's converter writes.

    They are needed if a checkpoint that DeepSpeed saves later is converted again.
    """
    keys = {key: f"^{re.escape(key)}$" for key in infos}
    return {
        "universal_checkpoint_version": _FORMAT,
        "original_vocab_size": source.saved.vocab_size,
        "padded_vocab_size": infos[VOCABULARY[0]].shape[0],
        "vocabulary_parameter_patterns": [keys[key] for key in VOCABULARY if key in keys],
        "tp_replicated_parameter_patterns": [keys[key] for key in infos if split[key].dim is None],
        "parameter_with_row_parallelism_patterns": [keys[key] for key in infos if split[key].dim == 1],
        "parameter_with_2_sub_params_cat_dim_0": [keys[key] for key in infos if split[key].parts == 2],
    }


def _description(source: Source, precision: str, files: dict[str, FileDigest]) -> Description:
    training = source.training
    dtypes = {key: str(info.dtype).removeprefix("torch.") for key, info in _tensors(source).infos().items()}
    return Description(
        identity=identity_of(source.saved, precision) if training is None else training.identity,
        dtypes=dtypes,
        progress=source.progress,
        schedule=None if training is None else training.optimizer.schedule,
        config=None if training is None else training.config,
        files=files,
    )
