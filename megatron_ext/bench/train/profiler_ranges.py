"""Profiler ranges for the parts of a training step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch.profiler import record_function

from megatron_ext.bench.train.step_trace import PREFIX
from megatron_ext.model.module_parts import part_members, wrap_method
from megatron_ext.model.step_parts import OPTIMIZER
from megatron_ext.training.trainer import Trainer


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """Return a profiler range for a part of the step. Time in an inner range does not count for the outer one."""
    return record_function(PREFIX + name)


@contextmanager
def record_parts(trainer: Trainer) -> Iterator[None]:
    """Context manager in which the modules of a trainer's model and its optimizer open a range for each call.

    Ranges surround `forward`, which recomputation calls again in the backward pass. The backward pass needs no ranges,
    since autograd links each of its operations to a forward operation.
    """
    with ExitStack() as stack:
        for owner, method, name in _calls(trainer):
            stack.enter_context(wrap_method(owner, method, partial(profiler_range, name)))
        yield


def _calls(trainer: Trainer) -> Iterator[tuple[Any, str, str]]:
    """Yield the calls to mark: object, method, part."""
    optimizer = trainer.optimizer
    for method in ("begin_step", "compute_grad_norm", "step"):
        yield optimizer, method, OPTIMIZER
    yield from ((member.module, "forward", member.part) for member in part_members(optimizer.chunks))
    models = (module for chunk in optimizer.chunks for module in chunk.modules() if isinstance(module, GPTModel))
    configs = {id(model.config): model.config for model in models}
    for config in configs.values():  # Megatron's schedule calls it after the last backward pass
        if config.finalize_model_grads_func is not None:
            yield config, "finalize_model_grads_func", OPTIMIZER
