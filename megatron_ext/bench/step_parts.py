"""Names the parts of a training step in a profiler's trace: what the host does for each is in a range of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch.profiler import record_function

from megatron_ext.bench.step_trace import PREFIX
from megatron_ext.model_parts import members, within
from megatron_ext.parts import OPTIMIZER
from megatron_ext.training.trainer import Trainer


def part(name: str) -> AbstractContextManager[Any]:
    """What the host does within it is of a part of the step; a range within another takes its own out of that."""
    return record_function(PREFIX + name)


@contextmanager
def named_parts(trainer: Trainer) -> Iterator[None]:
    """Within it the modules of a trainer's model, and its optimizer, name what they do.

    Ranges are put around `forward`, which recomputation calls again in the backward pass. Backward needs none: autograd
    tells which operation of the forward each of its own belongs to.
    """
    with ExitStack() as stack:
        for owner, method, name in _calls(trainer):
            stack.enter_context(within(owner, method, partial(part, name)))
        yield


def _calls(trainer: Trainer) -> Iterator[tuple[Any, str, str]]:
    """What is to be named: object, method, part."""
    optimizer = trainer.optimizer
    yield optimizer, "begin_step", OPTIMIZER
    yield optimizer, "finish_step", OPTIMIZER
    yield from ((member.module, "forward", member.part) for member in members(optimizer.chunks))
    models = (module for chunk in optimizer.chunks for module in chunk.modules() if isinstance(module, GPTModel))
    configs = {id(model.config): model.config for model in models}
    for config in configs.values():  # Megatron's schedule calls it after the last backward
        if config.finalize_model_grads_func is not None:
            yield config, "finalize_model_grads_func", OPTIMIZER
