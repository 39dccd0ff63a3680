"""Transports of all-to-all messages: NCCL's kernels, or the GPUs' copy engines.

NCCL moves data with kernels, which occupy multiprocessors that computation could use. Copy engines occupy no
multiprocessors. Each rank packs the messages for the other ranks into memory that all ranks of a node can read (torch's
symmetric memory). It then copies the messages that it receives from the other ranks' memory.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.config.schema import TransportName
from megatron_ext.parallel.agreement import gather_values
from megatron_ext.utils.errors import UserError


class MessageInFlight(NamedTuple):
    """Message in flight.

    Attributes:
        received_nx: received tensors by sending rank, [ranks, ...]; valid after `wait`.
        wait: function that makes the current stream wait for the message; on a CPU, it blocks the process.
    """

    received_nx: Tensor
    wait: Callable[[], None]


class Transport(Protocol):
    """All-to-all messages between the ranks of a group.

    Attributes:
        size: number of ranks.
    """

    size: int

    def send(self, parts_nx: Tensor) -> MessageInFlight:
        """Send `parts_nx[r]` to rank r without waiting. All ranks must send messages of equal sizes in the same order.

        Args:
            parts_nx: tensor [ranks, ...] of any strides.
        """


class Collective:
    """All-to-all of the group's backend: NCCL or gloo."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size = group, group.size()

    def send(self, parts_nx: Tensor) -> MessageInFlight:
        """Implement `Transport.send`."""
        sent_nx = parts_nx.contiguous()
        received_nx = torch.empty_like(sent_nx)
        work = dist.all_to_all_single(received_nx, sent_nx, group=self._group, async_op=True)

        def wait(_kept: Tensor = sent_nx) -> None:  # keeps the memory alive until it is sent
            work.wait()

        return MessageInFlight(received_nx, wait)


class _Outbox:
    """Memory of this rank that the other ranks can read.

    Raises:
        UserError: the GPUs cannot share memory, e.g. without NVLink.
    """

    def __init__(self, num_bytes: int, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory  # needed only here

        self.num_bytes = num_bytes
        buffer = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        try:
            self._shared: Any = symmetric_memory.rendezvous(buffer, group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            problem = f"copy_engine, but the GPUs cannot share memory ({reason})"
            raise UserError("parallel.context_transport", problem, "choose nccl") from error
        self._parts: dict[Any, tuple[Tensor, ...]] = {}

    def views(self, rank: int, template: Tensor) -> tuple[Tensor, ...]:
        """Return views of a rank's outbox by receiving rank, together of the shape and dtype of `template`.

        The views are cached to save host time.
        """
        key = rank, template.shape, template.dtype
        if key not in self._parts:
            self._parts[key] = self._shared.get_buffer(rank, template.shape, template.dtype).unbind()
        return self._parts[key]

    def synchronize(self) -> None:
        """Make the current stream wait for the streams of all ranks."""
        self._shared.barrier()


class CopyEngines:
    """Transport in which each rank copies its messages from the other ranks' memory, on a separate stream.

    If the tensors are strided, packing into an outbox needs a kernel, which runs on the computing stream. Otherwise the
    copy engines pack on the separate stream, overlapping with computation. All ranks synchronise before reading, so
    that every outbox is filled, and after reading, so that every outbox may be reused. A rank reuses an outbox once its
    computing stream has waited for the message.

    Args:
        group: ranks of one node.

    Raises:
        UserError: the ranks are on several hosts.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size, self._rank = group, group.size(), group.rank()
        host_names: list[str] = gather_values(socket.gethostname(), group)
        if len(set(host_names)) > 1:
            raise UserError(
                "parallel.context_transport",
                f"copy_engine, but the ranks of a context-parallel group are on {', '.join(sorted(set(host_names)))}",
                "choose nccl, or a tensor * context that divides the GPUs of a node",
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(priority=-1)
        self._free: list[_Outbox] = []

    def send(self, parts_nx: Tensor) -> MessageInFlight:
        """Implement `Transport.send`; the first messages of a size wait for all ranks, to allocate shared memory."""
        outbox = self._allocate(parts_nx.nbytes)
        own_views = outbox.views(self._rank, parts_nx)
        received_nx = parts_nx.new_empty(parts_nx.shape)
        parts, received = parts_nx.unbind(), received_nx.unbind()
        is_contiguous = parts_nx.is_contiguous()

        def pack() -> None:
            for rank in range(self.size):
                (received if rank == self._rank else own_views)[rank].copy_(parts[rank])

        if not is_contiguous:
            pack()
        self._stream.wait_stream(torch.cuda.current_stream())
        received_event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            if is_contiguous:
                pack()
            outbox.synchronize()
            for step in range(1, self.size):  # no two ranks read from the same rank at once
                rank = (self._rank + step) % self.size
                received[rank].copy_(outbox.views(rank, parts_nx)[self._rank])
            outbox.synchronize()
            received_event.record()

        def wait(_kept: Tensor | None = parts_nx if is_contiguous else None) -> None:  # keeps it alive until read
            torch.cuda.current_stream().wait_event(received_event)
            self._free.append(outbox)

        return MessageInFlight(received_nx, wait)

    def _allocate(self, num_bytes: int) -> _Outbox:
        """Return the smallest free outbox that is large enough, or a new one.

        All ranks make the same choice, because they send messages of the same sizes in the same order.
        """
        candidates = [box for box in self._free if box.num_bytes >= num_bytes]
        if not candidates:
            return _Outbox(num_bytes, self._group, self._device)
        chosen = min(candidates, key=lambda box: box.num_bytes)
        self._free.remove(chosen)
        return chosen


@cache
def transport_of(group: ProcessGroup, name: TransportName) -> Transport:
    """Return the transport of a group, shared by all layers; see `ParallelConfig.context_transport`.

    The first call for each group and name is collective.
    """
    return CopyEngines(group) if name == "copy_engine" else Collective(group)


def forget_transports() -> None:
    """Release the transports and their memory, for groups that no longer exist."""
    transport_of.cache_clear()
