"""Names the parts of a training step in a profiler's trace: what the host does for each is in a range of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.profiler import record_function

from megatron_ext.bench.step_trace import EMBEDDING, FEED_FORWARD, LOSS, MIXER, NORMS, OPTIMIZER, PREFIX
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
            stack.enter_context(_ranged(owner, method, name))
        yield


def _calls(trainer: Trainer) -> Iterator[tuple[Any, str, str]]:
    """What is to be named: object, method, part."""
    optimizer = trainer.optimizer
    yield optimizer, "begin_step", OPTIMIZER
    yield optimizer, "finish_step", OPTIMIZER
    configs: dict[int, Any] = {}
    for chunk in optimizer.chunks:
        for module in chunk.modules():
            yield from ((one, "forward", name) for one, name in _modules(module))
            if isinstance(module, GPTModel):
                configs[id(module.config)] = module.config
    for config in configs.values():  # Megatron's schedule calls it after the last backward
        if config.finalize_model_grads_func is not None:
            yield config, "finalize_model_grads_func", OPTIMIZER


def _modules(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str]]:
    if isinstance(module, GPTModel):
        yield module, LOSS  # all that is not the embedding or the layers
        if module.pre_process:
            yield module.embedding, EMBEDDING
    elif isinstance(module, TransformerBlock):
        yield module, NORMS
    elif isinstance(module, TransformerLayer):
        yield module, NORMS
        yield module.self_attention, MIXER
        if not isinstance(module.mlp, IdentityOp):
            yield module.mlp, FEED_FORWARD


@contextmanager
def _ranged(owner: Any, method: str, name: str) -> Iterator[None]:
    """Have a method of one object, and of no other of its class, name its part."""
    original: Callable[..., Any] = getattr(owner, method)
    is_own = method in vars(owner)

    @wraps(original)
    def ranged(*args: Any, **more: Any) -> Any:
        with part(name):
            return original(*args, **more)

    setattr(owner, method, ranged)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, method, original)
        else:
            delattr(owner, method)
