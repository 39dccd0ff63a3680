"""Tensors of one model family computed from those of another by conversion rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.conversion.core.family import Rule
from megatron_ext.conversion.core.tensors import TensorInfo, Tensors, check_keys
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One direction of a rule: the input keys, the output keys, and the function between their tensors."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    convert: Callable[[Sequence[Tensor]], list[Tensor]]


def to_ours(rules: Iterable[Rule]) -> list[Step]:
    """Return the steps from another family's tensors to ours."""
    return [Step(rule.theirs, rule.ours, rule.to_ours) for rule in rules]


def to_theirs(rules: Iterable[Rule]) -> list[Step]:
    """Return the steps from our tensors to another family's."""
    return [Step(rule.ours, rule.theirs, rule.to_theirs) for rule in rules]


class ConvertedTensors(Tensors):
    """Tensors computed lazily from other tensors, one step at a time.

    Args:
        source: input tensors.
        steps: conversion steps. Together they must read every tensor of the source and make each output once.
        where: file or folder to name in error messages.
        unused: keys of the source that the steps do not read.

    Raises:
        UserError: tensors that the steps read are missing, the source has others, or shapes do not fit.
    """

    def __init__(self, source: Tensors, steps: Sequence[Step], where: str, unused: Iterable[str] = ()) -> None:
        self._source, self._steps = source, steps
        needed = [key for step in steps for key in step.inputs]
        check_keys(needed, [key for key in source.infos() if key not in set(unused)], where)
        self._by_output = {key: step for step in steps for key in step.outputs}
        self._infos: dict[str, TensorInfo] = {}
        for step in steps:
            self._infos.update(self._output_infos(step, where))

    def _output_infos(self, step: Step, where: str) -> dict[str, TensorInfo]:
        import torch

        infos = self._source.infos()
        inputs = [torch.empty(infos[key].shape, dtype=infos[key].dtype, device="meta") for key in step.inputs]
        try:
            outputs = step.convert(inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{key} {list(infos[key].shape)}" for key in step.inputs)
            problem = f"has tensors that do not match its configuration: {shapes}"
            raise UserError(where, problem, "give the configuration with which the model was trained") from error
        assert len(outputs) == len(step.outputs), step.outputs
        pairs = zip(step.outputs, outputs, strict=True)
        return {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in pairs}

    def infos(self) -> Mapping[str, TensorInfo]:
        """Implement `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """Implement `Tensors.read`. The step's other outputs are discarded, so `stream` is faster for many tensors."""
        step = self._by_output[key]
        return self._convert(step)[step.outputs.index(key)]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """Implement `Tensors.stream`."""
        for step in self._steps:
            tensors = self._convert(step)
            for key in step.outputs:
                yield key, tensors.pop(0)

    def _convert(self, step: Step) -> list[Tensor]:
        return step.convert([self._source.read(key) for key in step.inputs])
