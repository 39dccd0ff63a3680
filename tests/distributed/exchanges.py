"""Functions run by each rank in the tests of exchanges and of initial weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from parity import VOCABULARY, whole_parameters
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import RunConfig
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel import heads
from megatron_ext.parallel.exchange import copy_to_group, gather_sequence
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.parallel.heads import all_heads, heads_to_sequence, sequence_to_heads
from megatron_ext.parallel.transport import Collective
from megatron_ext.parallel.zigzag import from_zigzag, to_zigzag
from megatron_ext.platform.device import select_platform

Moved = tuple[Tensor, Tensor]
"""Output of an exchange, and the gradient of its input."""


def _to_heads(x_tbnw: Tensor, group: ProcessGroup, rounds: int) -> Tensor:
    return torch.cat([of_round for (of_round,) in sequence_to_heads([x_tbnw], Collective(group), rounds)], 2)


def _to_sequence(x_tbnw: Tensor, group: ProcessGroup, rounds: int) -> Tensor:
    return all_heads([heads_to_sequence(of_round, Collective(group)) for of_round in x_tbnw.chunk(rounds, 2)])


EXCHANGES = {
    "heads": partial(_to_heads, rounds=1),
    "heads in rounds": partial(_to_heads, rounds=2),
    "sequence": partial(_to_sequence, rounds=1),
    "sequence in rounds": partial(_to_sequence, rounds=2),
    "gather": gather_sequence,
    "to_zigzag": to_zigzag,
    "from_zigzag": from_zigzag,
}


def whole(t: int, heads: int, dtype: torch.dtype) -> Tensor:
    """Tensor [t, 2, heads, 3] of integers below 61, so that bf16 represents sums of a few of them exactly."""
    return (torch.arange(t * 2 * heads * 3) % 61).view(t, 2, heads, 3).to(dtype)


def move(rank: int, world_size: int, name: str, x_tbnw: Tensor) -> Moved:
    """Apply an exchange to this rank's shard of x, forward and backward.

    The upstream gradient is this rank's shard of x after the exchange. It is (rank + 1) times x for `gather`, and twice
    the output for the zigzag exchanges.
    """
    group = dist.group.WORLD
    assert group is not None
    function = EXCHANGES[name]
    to_sequence = name.startswith("sequence")
    dim = 2 if to_sequence else 0
    part = x_tbnw.chunk(world_size, dim)[rank].clone().requires_grad_()
    moved = function(part, group)
    if name == "gather":
        upstream = x_tbnw * (rank + 1)
    elif name.endswith("zigzag"):
        upstream = moved.detach() * 2
    else:
        upstream = x_tbnw.chunk(world_size, 0 if to_sequence else 2)[rank]
    moved.backward(upstream)
    assert part.grad is not None
    return moved.detach().clone(), part.grad.clone()


@contextmanager
def messages_told(happened: list[str]) -> Iterator[None]:
    """Context manager that records each send of a message and each wait for one in `happened`."""

    def told(what: str) -> Any:
        original = getattr(heads._Message, what)

        def call(*args: Any) -> Any:
            happened.append(what)
            return original(*args)

        return patch.object(heads._Message, what, call)

    with told("send"), told("wait"):
        yield


def order_of_rounds(rank: int, world_size: int, rounds: int) -> list[str]:
    """Events in order, forward and backward, while heads are exchanged in rounds and doubled."""
    group = dist.group.WORLD
    assert group is not None
    transport = Collective(group)
    happened: list[str] = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
            ctx.number = number
            happened.append(f"mix {number}")
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            happened.append(f"mix {ctx.number}")
            return 2 * grad, None

    x = whole(3, 2 * rounds * world_size, torch.float32).requires_grad_()
    with messages_told(happened):
        mixed = [
            heads_to_sequence(Doubled.apply(of_round, number), transport)
            for number, (of_round,) in enumerate(sequence_to_heads([x], transport, rounds))
        ]
        y = all_heads(mixed)
        happened.append("backward")
        y.backward(x.detach())
    assert torch.equal(y, 2 * x)
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x)
    return happened


def order_in_mixer(rank: int, world_size: int, config: RunConfig) -> list[str]:
    """Events in order, forward and backward, while the first mixer of a model processes two samples."""
    platform = select_platform("cpu")
    groups = make_process_groups(config.parallel, config.training.seed)
    (model,) = build_model(model_shape(config, platform, VOCABULARY), platform, groups, config.training.seed)
    mixer = next(module for module in model.modules() if isinstance(module, Mixer))
    happened: list[str] = []

    def told(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            happened.append(name)
            result = function(*args)
            computed = result if isinstance(result, Tensor) else result[0]
            computed.register_hook(lambda _: happened.append(name))
            return result

        return call

    mixer.features, mixer.mix = told("in", mixer.features), told("mix", mixer.mix)  # type: ignore[method-assign]
    mixer.out_proj.forward = told("out", mixer.out_proj.forward)
    hidden_states = torch.ones(3, 2, config.model.hidden_size, requires_grad=True)
    with messages_told(happened):
        mixed, _ = mixer(hidden_states)
        happened.append("backward")
        mixed.sum().backward()
    return happened


def transposed_gradient(rank: int, world_size: int, x: Tensor) -> Tensor:
    """Gradient of x for a loss that rank r weights with r + 1. The upstream gradient is not contiguous in memory."""
    group = dist.group.WORLD
    assert group is not None
    leaf = x.clone().requires_grad_()
    copy_to_group(leaf, group).backward((x.mT.contiguous() * (rank + 1)).mT)
    assert leaf.grad is not None
    return leaf.grad


def initial_weights(rank: int, world_size: int, config: RunConfig) -> dict[str, Tensor]:
    """Return the whole initial parameters on rank 0, and an empty dict on other ranks."""
    platform = select_platform("cpu")
    groups = make_process_groups(config.parallel, config.training.seed)
    chunks = build_model(model_shape(config, platform, VOCABULARY), platform, groups, config.training.seed)
    return whole_parameters(chunks, groups.tp.rank())
