"""All-to-all between sequence shards of all heads and whole sequences of some heads, overlapped with mixing.

Under context parallelism each rank has a contiguous sequence shard of all heads, and a mixer needs the whole sequence
of some heads. Tensors are [t, b, n, w] as in `exchange`.

A message has two nodes in the autograd graph: one node sends and the other waits. Computation between the two nodes
overlaps with the message. In the backward pass, the node that waited sends the gradient, and the node that sent waits
for the gradient. Autograd runs ready nodes in the reverse order of the forward pass, so that the overlap is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.parallel.transport import MessageInFlight, Transport


class _Message:
    """Message of the forward pass, and later its gradient in the backward pass. Only one of them is in flight."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sent: MessageInFlight | None = None

    def send(self, parts_nx: Tensor) -> Tensor:
        """Send `parts_nx[r]` to rank r. Return the tensor to be received, whose element r comes from rank r."""
        self._sent = self._transport.send(parts_nx)
        return self._sent.received_nx

    def wait(self) -> None:
        """Wait for the message. On a GPU only the stream waits, not the host."""
        assert self._sent is not None
        self._sent.wait()
        self._sent = None


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_nx: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        return message.send(parts_nx)

    @staticmethod
    def backward(ctx: Any, grad_nx: Tensor) -> tuple[Tensor, None]:
        ctx.message.wait()
        return grad_nx, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts_nx: Tensor, message: _Message) -> Tensor:
        ctx.message = message
        message.wait()
        return parts_nx.view_as(parts_nx)

    @staticmethod
    def backward(ctx: Any, grad_nx: Tensor) -> tuple[Tensor, None]:
        return ctx.message.send(grad_nx), None


class AsyncAllToAll:
    """All-to-all message in flight.

    Args:
        parts_nx: tensors to send by receiving rank, [ranks, ...].
        transport: transport of the group.
    """

    def __init__(self, parts_nx: Tensor, transport: Transport) -> None:
        self._message = _Message(transport)
        self._parts_nx = _Send.apply(parts_nx, self._message)

    def wait(self) -> Tensor:
        """Wait for the message and return the received tensors by sending rank, [ranks, ...]."""
        received_nx: Tensor = _Wait.apply(self._parts_nx, self._message)
        return received_nx


def sequence_to_heads(
    features_tbnw: Sequence[Tensor], transport: Transport, rounds: int = 1
) -> Iterator[tuple[Tensor, ...]]:
    """Exchange a sequence shard of all heads for the whole sequence of some heads, in several messages.

    All messages are sent at once, so that later ones overlap with the mixing of earlier ones.

    Args:
        features_tbnw: [t/cp, b, n, width] each; n must be divisible by cp * rounds.
        transport: transport of the context-parallel group; rank r gets heads [r*n/cp, (r+1)*n/cp).
        rounds: number of messages per tensor.

    Returns:
        Iterator over the rounds, in the order of the heads: [t, b, n / (cp * rounds), width] of each tensor. Each step
        waits for the messages of its round.
    """
    chunks = [x.unflatten(2, (transport.size, rounds, -1)).unbind(3) for x in features_tbnw]
    messages = deque(
        [AsyncAllToAll(x.permute(2, 0, 1, 3, 4), transport) for x in features] for features in zip(*chunks, strict=True)
    )
    return _received_rounds(messages)


def _received_rounds(messages: deque[list[AsyncAllToAll]]) -> Iterator[tuple[Tensor, ...]]:
    while messages:
        yield tuple(x.wait().flatten(0, 1) for x in messages.popleft())


def heads_to_sequence(x_tbnw: Tensor, transport: Transport) -> AsyncAllToAll:
    """Send the heads of a round back to the ranks of their sequence shards. `all_heads` receives them.

    Args:
        x_tbnw: whole sequence of the round's heads, [t, b, n, w].
        transport: transport of the context-parallel group.
    """
    return AsyncAllToAll(x_tbnw.unflatten(0, (transport.size, -1)), transport)


def all_heads(rounds: Sequence[AsyncAllToAll]) -> Tensor:
    """Wait for the heads of all rounds and return the sequence shard of all heads, [t/cp, b, n, w]."""
    return torch.stack([x.wait().permute(1, 2, 0, 3, 4) for x in rounds], 3).flatten(2, 4)
