"""Writing DeepSpeed's universal checkpoints, a tensor at a time, as its own loader reads them.

What `DeepSpeedEngine.load_checkpoint` asks for with `"checkpoint": {"load_universal": true}`, at ZeRO-1, 2 and 3:
deepspeed.checkpoint.universal_checkpoint, runtime.base_optimizer and runtime.zero.stage3. DeepSpeed is not imported:
that takes longer than to convert a small model.
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

from megatron_ext.checkpoint.contents import CheckedFile, Content
from megatron_ext.checkpoint.conversion.forms import ZERO
from megatron_ext.checkpoint.conversion.our_model import Split, splits
from megatron_ext.checkpoint.conversion.saved import identity_of, shape_of
from megatron_ext.checkpoint.conversion.source import Source
from megatron_ext.checkpoint.conversion.tensors import VOCABULARY, Changed, TensorInfo, Tensors
from megatron_ext.checkpoint.conversion.universal import DESCRIPTION, NEWEST, PRECISE, Description
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.files import write_whole
from megatron_ext.optim.state import MOMENTS

_FORMAT = 0.2
"""DeepSpeed's number for this form; from 0.4 on there are more fields, for what was split unevenly."""

_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""The same; an engine of ZeRO-3 looks for the second name."""


def tag_of(source: Source) -> str:
    """Folder of the checkpoint, called as DeepSpeed calls them."""
    return f"global_step{(source.progress or Progress()).step}"


def num_bytes(source: Source) -> int:
    """Bytes of the tensors that will be written."""
    tensors = _tensors(source)
    state = {} if source.training is None else source.training.optimizer.tensors.infos()
    moments = sum(info.num_bytes for key, info in state.items() if not key.startswith("param."))
    return 4 * tensors.num_elements + moments


def write_universal(source: Source, precision: str, folder: Path) -> None:
    """Write a universal checkpoint.

    Parameters have the names that `named_parameters` of our model gives them. The vocabulary is padded: DeepSpeed's
    loader would do it at ZeRO-1 and 2, but at ZeRO-3 it puts what is too short in the wrong place without a word.

    Args:
        source: what to write.
        precision: of the run that goes on from here, where the source is no run.
        folder: exists; `latest_universal` goes here, the rest into a folder below.

    Raises:
        OSError: the disk refuses.
        RuntimeError: the same, from torch.
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
    write_whole(folder / tag / DESCRIPTION, text.encode())
    write_whole(folder / NEWEST, tag.encode())


class _Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written: dict[str, Content] = {}

    def save(self, name: str, content: Any) -> None:
        path = self._folder / name
        path.parent.mkdir(exist_ok=True)
        with CheckedFile(path) as file:
            torch.save(content, cast(Any, file))
        self.written[name] = file.content


def _tensors(source: Source) -> Tensors:
    """The model's, with the rows of the vocabulary's padding: those that were trained with it, or zeros."""
    if source.training is not None:
        return source.training.tensors
    rows = shape_of(source.saved).padded_vocab_size

    def padded(key: str, tensor: Tensor) -> Tensor:
        return functional.pad(tensor, (0, 0, 0, rows - len(tensor))) if key in VOCABULARY else tensor

    return Changed(source.tensors, padded)


def _steps(source: Source) -> int:
    return 0 if source.training is None else int(source.training.optimizer.schedule["num_steps"])


def _kinds(source: Source, tensors: Tensors, key: str) -> Iterator[tuple[str, Tensor]]:
    """A parameter's tensors, whole and alone in their storage, all of which torch would save."""
    if source.training is None:
        yield PRECISE, _alone(tensors.read(key).float())
        shape = tensors.infos()[key].shape
        for moment in MOMENTS:  # ZeRO-3 wants them; one number is kept, whatever the shape
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
    """What DeepSpeed's loader must know to give a tensor-parallel rank its part; one of the whole shape needs all."""
    how: dict[str, Any] = {"cat_dim": split.dim or 0}
    if split.parts > 1:
        how["param_n_sub_params"] = split.parts
    if key in VOCABULARY:
        how["vocab_tensor"] = True  # may be padded further
    return how


def _optimizer_state(steps: int, groups: int) -> dict[str, Any]:
    """What is no parameter's. Rates, betas and the like are the engine's own: they may have changed.

    DeepSpeed loads as many groups as both sides have and leaves out the rest without a word; no engine has more of
    them than parameters.
    """
    empty: list[dict[str, Any]] = [{"params": []} for _ in range(groups)]
    of_zero3 = {"state": {0: {"step": torch.tensor(float(steps))}}, "param_groups": empty[:1]}
    return {"ds_version": version("deepspeed"), "param_groups": empty, "optimizer_state_dict": of_zero3}


def _model_states(source: Source, infos: Mapping[str, TensorInfo], split: Mapping[str, Split]) -> dict[str, Any]:
    progress = source.progress or Progress()
    return {
        "module": {},  # a universal checkpoint's weights are those in zero/
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
    """The same as `_how_it_splits`, as DeepSpeed's converter has it: a checkpoint that goes on may need it again."""
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


def _description(source: Source, precision: str, files: dict[str, Content]) -> Description:
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
