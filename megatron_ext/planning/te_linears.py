"""What Transformer Engine's linears keep for their backward passes, where Megatron's stand in their places.

As transformer_engine.pytorch.module.linear of 2.11 has it: an input that does not lie row after row in memory is copied
into rows, and the copy is kept; in 8 bits the input is kept in these, with its scales.
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

from megatron_ext.model_parts import within
from megatron_ext.output_layer import LossOutputLayer

BYTES = {"tensorwise": 1.0, "blockwise": 1 + 4 / 128}
"""That a number takes in 8 bits, with its share of the scales of its hidden states: fp32, one for 128 in blocks."""

Linear: TypeAlias = ColumnParallelLinear | RowParallelLinear


def linears(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Linear]]:
    """Those of layers, by name, whose places Transformer Engine's back-end gives to its own: not the output layer."""
    for whole in modules:
        for name, module in whole.named_modules():
            if isinstance(module, Linear) and not isinstance(module, LossOutputLayer):
                yield name.removeprefix("module."), module  # bf16 wraps the whole in one


def weights_of_linears(modules: Iterable[nn.Module]) -> int:
    """How many they have on this rank."""
    return sum(linear.weight.numel() for _name, linear in linears(modules))


@contextmanager
def as_transformer_engines(modules: Sequence[nn.Module], fp8: str) -> Iterator[None]:
    """Within it linears of layers keep what Transformer Engine's would.

    Args:
        modules: a model's chunks.
        fp8: none, tensorwise or blockwise; see `TrainingConfig`.
    """
    with ExitStack() as stack:
        for _name, linear in linears(modules):
            stack.callback(linear.register_forward_pre_hook(_row_after_row).remove)
            if fp8 != "none":
                stack.enter_context(within(linear, "forward", partial(_keeping_8_bits, BYTES[fp8])))
        yield


def _row_after_row(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    hidden_states, *others = inputs
    return hidden_states.contiguous(), *others


class _In8Bits(NamedTuple):
    """Hidden states that are kept in 8 bits.

    Attributes:
        kept: as many bytes as they take.
        shape: theirs.
        dtype: that they are made of again.
    """

    kept: Tensor
    shape: torch.Size
    dtype: torch.dtype


def _keeping_8_bits(bytes_each: float) -> saved_tensors_hooks:
    """Within it hidden states [t, b, features] are kept in 8 bits; weights [features, features] are there anyway."""

    def pack(x: Tensor) -> Tensor | _In8Bits:
        if x.dim() != 3:
            return x
        kept = torch.empty(ceil(bytes_each * x.numel()), dtype=torch.uint8, device="meta")
        return _In8Bits(kept, x.shape, x.dtype)

    def unpack(kept: Tensor | _In8Bits) -> Tensor:
        return torch.empty(kept.shape, dtype=kept.dtype, device="meta") if isinstance(kept, _In8Bits) else kept

    return saved_tensors_hooks(pack, unpack)
