"""Writer of DeepSpeed's universal checkpoints, one tensor at a time.

`DeepSpeedEngine.load_checkpoint` reads the files with `"checkpoint": {"load_universal": true}` at ZeRO-1, 2 and 3. See
deepspeed.checkpoint.universal_checkpoint, runtime.base_optimizer and runtime.zero.stage3. DeepSpeed itself is not
imported, because the import takes longer than the conversion of a small model.
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
from megatron_ext.conversion.core.tensors import VOCABULARY, TensorInfo, Tensors, TransformedTensors
from megatron_ext.conversion.deepspeed.universal import DESCRIPTION, FP32, NEWEST, Description
from megatron_ext.optim.algorithms.adamw import MOMENTS
from megatron_ext.utils.atomic_files import write_atomically

_FORMAT = 0.2
"""DeepSpeed's version number of this format. From 0.4 on there are further fields for uneven shards."""

_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Names of two files with the same content. An engine at ZeRO-3 reads the second one."""


def checkpoint_tag(source: Source) -> str:
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
    tag, num_steps = checkpoint_tag(source), _num_steps(source)
    (folder / tag / ZERO).mkdir(parents=True)
    files, split, tensors = _Files(folder / tag), splits(source.saved), _tensors(source)
    infos = tensors.infos()
    for key in infos:
        for kind, tensor in _tensors_by_kind(source, tensors, key):
            files.save(f"{ZERO}/{key}/{kind}.pt", {"param": tensor, **_split_fields(key, split[key])})
        files.save(f"{ZERO}/{key}/step.pt", torch.tensor(float(num_steps)))
    files.save(f"{ZERO}/optimizer_state.pt", _optimizer_state(num_steps, len(infos)))
    for name in _MODEL_STATES:
        files.save(name, _model_states(source, infos, split))
    text = json.dumps(asdict(_build_description(source, precision, files.written)), indent=1)
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
    padded_vocab_size = shape_of(source.saved).padded_vocab_size

    def pad_rows(key: str, tensor: Tensor) -> Tensor:
        return functional.pad(tensor, (0, 0, 0, padded_vocab_size - len(tensor))) if key in VOCABULARY else tensor

    return TransformedTensors(source.tensors, pad_rows)


def _num_steps(source: Source) -> int:
    return 0 if source.training is None else int(source.training.optimizer.schedule["num_steps"])


def _tensors_by_kind(source: Source, tensors: Tensors, key: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a parameter by kind.

    Each tensor has its own storage, because torch saves the whole storage of a view.
    """
    if source.training is None:
        yield FP32, _own_storage(tensors.read(key).float())
        shape = tensors.infos()[key].shape
        for moment in MOMENTS:  # ZeRO-3 requires the moments. An expanded zero stores a single element.
            yield moment, torch.zeros(()).expand(shape)
        return
    state = source.training.optimizer.tensors
    has_moments = f"param.{key}" in state.infos()
    fp32 = state.read(f"param.{key}") if has_moments else tensors.read(key).float()
    yield FP32, _own_storage(fp32)
    for moment in MOMENTS if has_moments else ():
        yield moment, _own_storage(state.read(f"{moment}.{key}"))


def _own_storage(tensor: Tensor) -> Tensor:
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def _split_fields(key: str, split: Split) -> dict[str, Any]:
    """Return the fields by which DeepSpeed's loader cuts a parameter into tensor-parallel shards.

    The loader loads a replicated parameter unchanged on each rank, because the shapes are equal.
    """
    fields: dict[str, Any] = {"cat_dim": split.dim or 0}
    if split.parts > 1:
        fields["param_n_sub_params"] = split.parts
    if key in VOCABULARY:
        fields["vocab_tensor"] = True  # the loader may pad it further
    return fields


def _optimizer_state(num_steps: int, num_groups: int) -> dict[str, Any]:
    """Return the optimizer state that belongs to no single parameter.

    Learning rates, betas and similar values are not stored, so that the engine uses its own. DeepSpeed silently loads
    only as many parameter groups as both sides have. Here each parameter has a group, and no engine has more groups.
    """
    empty_groups: list[dict[str, Any]] = [{"params": []} for _ in range(num_groups)]
    zero3_state = {"state": {0: {"step": torch.tensor(float(num_steps))}}, "param_groups": empty_groups[:1]}
    return {"ds_version": version("deepspeed"), "param_groups": empty_groups, "optimizer_state_dict": zero3_state}


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
    """Return the fields of `_split_fields` as the patterns that DeepSpeed's converter writes.

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


def _build_description(source: Source, precision: str, files: dict[str, FileDigest]) -> Description:
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
