"""Tensors that are made of others: those of one family from another's, by its rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.checkpoint.conversion.family import Rule
from megatron_ext.checkpoint.conversion.tensors import TensorInfo, Tensors, check_keys
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """A rule in one direction: keys that are read, keys that are made of them, and how."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    make: Callable[[Sequence[Tensor]], list[Tensor]]


def to_ours(rules: Iterable[Rule]) -> list[Step]:
    """Rules as steps from another family's tensors to ours."""
    return [Step(rule.theirs, rule.ours, rule.to_ours) for rule in rules]


def to_theirs(rules: Iterable[Rule]) -> list[Step]:
    """Rules as steps from our tensors to another family's."""
    return [Step(rule.ours, rule.theirs, rule.to_theirs) for rule in rules]


class Made(Tensors):
    """Tensors that are made of others by steps, a step at a time.

    Args:
        source: the others.
        steps: together read every one of them, and make every one of these once.
        where: file or folder that messages name.
        unused: keys of the source that mean nothing to the steps.

    Raises:
        UserError: the source lacks tensors that the steps read, or has others.
    """

    def __init__(self, source: Tensors, steps: Sequence[Step], where: str, unused: Iterable[str] = ()) -> None:
        self._source, self._steps = source, steps
        needed = [key for step in steps for key in step.inputs]
        check_keys(needed, [key for key in source.infos() if key not in set(unused)], where)
        self._by_output = {key: step for step in steps for key in step.outputs}
        self._infos: dict[str, TensorInfo] = {}
        for step in steps:
            self._infos.update(self._infos_of(step, where))

    def _infos_of(self, step: Step, where: str) -> dict[str, TensorInfo]:
        import torch

        infos = self._source.infos()
        inputs = [torch.empty(infos[key].shape, dtype=infos[key].dtype, device="meta") for key in step.inputs]
        try:
            outputs = step.make(inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            shapes = ", ".join(f"{key} {list(infos[key].shape)}" for key in step.inputs)
            problem = f"has tensors that do not fit its configuration: {shapes}"
            raise UserError(where, problem, "give the configuration that the model was made with") from error
        assert len(outputs) == len(step.outputs), step.outputs
        pairs = zip(step.outputs, outputs, strict=True)
        return {key: TensorInfo(tuple(tensor.shape), tensor.dtype) for key, tensor in pairs}

    def infos(self) -> Mapping[str, TensorInfo]:
        """See `Tensors.infos`."""
        return self._infos

    def read(self, key: str) -> Tensor:
        """See `Tensors.read`; what is made with it is made in vain, so `stream` is better for many."""
        step = self._by_output[key]
        return self._make(step)[step.outputs.index(key)]

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """See `Tensors.stream`."""
        for step in self._steps:
            made = self._make(step)
            for key in step.outputs:
                yield key, made.pop(0)

    def _make(self, step: Step) -> list[Tensor]:
        return step.make([self._source.read(key) for key in step.inputs])
