"""Parts of the sequence for whole heads, and back (all-to-all), while other heads are mixed.

Under context parallelism each rank holds a contiguous part of the sequence of all heads, and a mixer needs the whole
sequence of some. Tensors are [t, b, n, w] as in `exchange`.

A message is two nodes of autograd's graph, one that sends and one that waits. What is computed between them is computed
while the message is under way, in the backward pass too, where the waiting node sends the gradient and the sending one
waits for it: autograd goes through nodes that are ready in the reverse order of the forward pass.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.parallel.transport import Sent, Transport


class _Message:
    """What is under way, forward or backward: never both at once."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sent: Sent | None = None

    def send(self, parts_nx: Tensor) -> Tensor:
        """Send part r to rank r; what comes from it will be part r of the result."""
        self._sent = self._transport.send(parts_nx)
        return self._sent.received_nx

    def wait(self) -> None:
        """On a GPU it is the stream that waits, not the host."""
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


class UnderWay:
    """What every rank of a group has sent to every other.

    Args:
        parts_nx: [ranks, ...], what goes to each.
        transport: between the ranks.
    """

    def __init__(self, parts_nx: Tensor, transport: Transport) -> None:
        self._message = _Message(transport)
        self._parts_nx = _Send.apply(parts_nx, self._message)

    def arrived(self) -> Tensor:
        """[ranks, ...], what came from each."""
        arrived_nx: Tensor = _Wait.apply(self._parts_nx, self._message)
        return arrived_nx


def sequence_to_heads(
    features_tbnw: Sequence[Tensor], transport: Transport, rounds: int = 1
) -> Iterator[tuple[Tensor, ...]]:
    """From a part of the sequence of all heads to the whole sequence of a part of the heads, some at a time.

    All are sent at once, so that the others travel while the first are mixed.

    Args:
        features_tbnw: [t/cp, b, n, width] each; n must divide by cp * rounds.
        transport: of the context-parallel group; rank r gets heads [r*n/cp, (r+1)*n/cp).
        rounds: how many messages a tensor is sent in.

    Returns:
        For each round, in the order of the heads, [t, b, n / (cp * rounds), width] of each tensor; to be waited for
        where it is asked for.
    """
    cut = [x.unflatten(2, (transport.size, rounds, -1)).unbind(3) for x in features_tbnw]
    coming = deque(
        [UnderWay(x.permute(2, 0, 1, 3, 4), transport) for x in of_round] for of_round in zip(*cut, strict=True)
    )
    return _arrivals(coming)


def _arrivals(coming: deque[list[UnderWay]]) -> Iterator[tuple[Tensor, ...]]:
    while coming:
        yield tuple(x.arrived().flatten(0, 1) for x in coming.popleft())


def heads_to_sequence(x_tbnw: Tensor, transport: Transport) -> UnderWay:
    """The way back of a round's heads, [t, b, n, w] of the whole sequence; `all_heads` takes what has arrived."""
    return UnderWay(x_tbnw.unflatten(0, (transport.size, -1)), transport)


def all_heads(rounds: Sequence[UnderWay]) -> Tensor:
    """A part of the sequence of all heads, [t/cp, b, n, w], of what every round has sent back."""
    return torch.stack([x.arrived().permute(1, 2, 0, 3, 4) for x in rounds], 3).flatten(2, 4)
