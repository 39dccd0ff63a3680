"""Megatron linears that save the same bytes for backward as Transformer Engine's linears.

The emulation follows transformer_engine.pytorch.module.linear of version 2.11: A non-contiguous input is copied, and
the copy is saved. In FP8 the quantized input is saved with its scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import ceil
from typing import Any, NamedTuple, TypeAlias

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megatron_ext.model.module_parts import wrap_method
from megatron_ext.model.output_layer import LossOutputLayer

FP8_BYTES_PER_ELEMENT = {"tensorwise": 1.0, "blockwise": 1 + 4 / 128}
"""Bytes per element of hidden states in FP8, by recipe. Blockwise scaling adds an fp32 scale per 128 elements."""

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear


def linears(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Linear]]:
    """Yield names and linears that the Transformer Engine back-end replaces: all except the output layer."""
    for chunk in modules:
        for name, module in chunk.named_modules():
            if isinstance(module, Linear) and not isinstance(module, LossOutputLayer):
                yield name.removeprefix("module."), module  # the bf16 wrapper adds the prefix


def num_linear_weights(modules: Iterable[nn.Module]) -> int:
    """Return the number of weights of the linears on this rank."""
    return sum(linear.weight.numel() for _name, linear in linears(modules))


@contextmanager
def save_like_transformer_engine(modules: Sequence[nn.Module], fp8: str) -> Iterator[None]:
    """Context manager in which linears save the same bytes for backward as Transformer Engine's.

    Args:
        modules: model chunks.
        fp8: none, tensorwise or blockwise; see `TrainingConfig`.
    """
    with ExitStack() as stack:
        for _name, linear in linears(modules):
            stack.callback(linear.register_forward_pre_hook(_make_contiguous).remove)
            if fp8 != "none":
                stack.enter_context(wrap_method(linear, "forward", partial(_fp8_hooks, FP8_BYTES_PER_ELEMENT[fp8])))
        yield


def _make_contiguous(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden_states, *others = inputs
    return hidden_states.contiguous(), *others


class _SavedFp8(NamedTuple):
    """Hidden states saved in FP8.

    Attributes:
        saved: byte tensor as large as the hidden states and their scales in FP8.
        shape: of the hidden states.
        dtype: of the hidden states.
    """

    saved: Tensor
    shape: torch.Size
    dtype: torch.dtype


def _fp8_hooks(bytes_per_element: float) -> saved_tensors_hooks:
    """Return hooks that save hidden states [t, b, features] in FP8 and leave weights [features, features] unchanged."""

    def pack(x: Tensor) -> Tensor | _SavedFp8:
        if x.dim() != 3:
            return x
        saved = torch.empty(ceil(bytes_per_element * x.numel()), dtype=torch.uint8, device="meta")
        return _SavedFp8(saved, x.shape, x.dtype)

    def unpack(saved: Tensor | _SavedFp8) -> Tensor:
        return torch.empty(saved.shape, dtype=saved.dtype, device="meta") if isinstance(saved, _SavedFp8) else saved

    return saved_tensors_hooks(pack, unpack)
