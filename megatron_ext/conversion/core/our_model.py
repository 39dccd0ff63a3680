"""Selectron model of a checkpoint: its expected tensors, their tensor-parallel sharding, and its logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.core.float64 import in_float64
from megatron_ext.conversion.core.saved_model import shape_of
from megatron_ext.conversion.core.staged import last_positions_only, on_meta, read_on_use
from megatron_ext.conversion.core.tensors import VOCABULARY, TensorInfo, Tensors
from megatron_ext.conversion.core.tolerance import MAX_POSITIONS
from megatron_ext.model import meta_device
from megatron_ext.model.build import build_model
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform.device import select_platform


@contextmanager
def _built_model(saved: SavedModel, *, materialize_buffers: bool = False) -> Iterator[MegatronModule]:
    """Return a context manager with the fp32 model on the meta device and process groups of this process alone.

    Args:
        saved: the model.
        materialize_buffers: create buffers with values, so that the model can be run. Each parameter is then allocated
            briefly, so the sizes in the configuration must have been compared with existing tensors.
    """
    platform = select_platform("cpu")
    with groups_of_one_process(platform.communication) as groups:
        parameters_on_meta = on_meta() if materialize_buffers else meta_device.on_meta()
        with parameters_on_meta, meta_device.reject_impossible_sizes("the model's configuration"):
            (model,) = build_model(shape_of(saved), platform, groups, seed=None)
        yield model


def expected_tensors(saved: SavedModel) -> dict[str, TensorInfo]:
    """Return the shapes of a model's tensors by our keys, without vocabulary padding. The dtypes are arbitrary."""
    with _built_model(saved) as model:
        infos = {}
        for key, parameter in model.named_parameters():  # in a single process these names are our checkpoint keys
            rows = (saved.vocab_size, *parameter.shape[1:]) if key in VOCABULARY else tuple(parameter.shape)
            infos[key] = TensorInfo(rows, parameter.dtype)
        return infos


@dataclass(frozen=True)
class Split:
    """Sharding of a parameter under tensor parallelism.

    Attributes:
        dim: sharded dimension; None: the parameter is replicated.
        parts: number of consecutive parts along `dim` that are sharded separately, such as SwiGLU's gate and value.
    """

    dim: int | None
    parts: int = 1


def splits(saved: SavedModel) -> dict[str, Split]:
    """Return the tensor-parallel sharding of each parameter of a model, by our keys."""
    with _built_model(saved) as model:
        gated = get_model_config(model).gated_linear_unit
        splits_by_key = {}
        for key, parameter in model.named_parameters():
            is_split = getattr(parameter, "tensor_model_parallel", False)
            parts = 2 if gated and key.endswith("linear_fc1.weight") else 1
            splits_by_key[key] = Split(int(parameter.partition_dim), parts) if is_split else Split(None)
        return splits_by_key


def compute_logits(saved: SavedModel, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """Compute the logits of our model in float64.

    Args:
        saved: the model.
        tensors: its weights, with the keys and shapes of `expected_tensors`.
        tokens_bt: int64 [b, t].

    Returns:
        float64 logits [b, k, v] of the last k tokens, at most `MAX_POSITIONS`, over the v tokens of the tokenizer.
    """

    def read(name: str) -> Tensor:
        return _pad_rows(tensors.read(name), shapes[name])

    with _built_model(saved, materialize_buffers=True) as model, torch.no_grad():
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        positions_bt = torch.arange(tokens_bt.shape[1]).expand_as(tokens_bt)
        with read_on_use(model.eval(), read), in_float64(), last_positions_only(model.output_layer, MAX_POSITIONS, 0):
            logits_btv: Tensor = model(tokens_bt, positions_bt, attention_mask=None)
        return logits_btv[..., : saved.vocab_size]


def _pad_rows(tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape == shape:
        return tensor
    padded = tensor.new_zeros(shape)
    padded[: len(tensor)] = tensor
    return padded
