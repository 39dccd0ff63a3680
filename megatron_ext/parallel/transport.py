"""How parts travel between the ranks of a group: in NCCL's kernels, or by the GPUs' copy engines.

NCCL moves data with kernels, which take multiprocessors from what is computed meanwhile. Copy engines take none: each
rank packs what the others get into memory that all ranks of a node can read (torch's symmetric memory), and fetches its
own parts out of theirs.
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
from megatron_ext.errors import UserError
from megatron_ext.parallel.agreement import gather_values


class Sent(NamedTuple):
    """A message under way.

    Attributes:
        received_nx: [ranks, ...], what comes from each; there once it has been waited for.
        wait: makes the current stream wait for it, on a CPU the process.
    """

    received_nx: Tensor
    wait: Callable[[], None]


class Transport(Protocol):
    """Takes parts from every rank of a group to every other.

    Attributes:
        size: ranks of the group.
    """

    size: int

    def send(self, parts_nx: Tensor) -> Sent:
        """Send part r to rank r, without waiting; all ranks send as much, in the same order.

        Args:
            parts_nx: [ranks, ...] of any strides.
        """


class Collective:
    """An all-to-all of the group's backend: NCCL's, or gloo's."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size = group, group.size()

    def send(self, parts_nx: Tensor) -> Sent:
        """See `Transport`."""
        sent_nx = parts_nx.contiguous()
        received_nx = torch.empty_like(sent_nx)
        work = dist.all_to_all_single(received_nx, sent_nx, group=self._group, async_op=True)

        def wait(_kept: Tensor = sent_nx) -> None:  # whose memory must not be used anew before it is sent
            work.wait()

        return Sent(received_nx, wait)


class _Outbox:
    """Memory of this rank that the others read.

    Raises:
        UserError: they cannot, as where there is no NVLink between GPUs.
    """

    def __init__(self, num_bytes: int, group: ProcessGroup, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory  # which nothing else here needs

        self.num_bytes = num_bytes
        own = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        try:
            self._shared: Any = symmetric_memory.rendezvous(own, group)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            problem = f"copy_engine, and the GPUs share no memory ({reason})"
            raise UserError("parallel.context_transport", problem, "choose nccl") from error
        self._parts: dict[Any, tuple[Tensor, ...]] = {}

    def of(self, rank: int, like: Tensor) -> tuple[Tensor, ...]:
        """What a rank's begins with, as parts of the shape and dtype of another's; made once, the host has no time."""
        key = rank, like.shape, like.dtype
        if key not in self._parts:
            self._parts[key] = self._shared.get_buffer(rank, like.shape, like.dtype).unbind()
        return self._parts[key]

    def meet(self) -> None:
        """The current stream goes on once those of all ranks are here."""
        self._shared.barrier()


class CopyEngines:
    """Each rank fetches its parts from the others' memory, on a stream of its own.

    An outbox is filled by the stream that computes where parts have to be put in order, which takes a kernel, and else
    by the engines' own, beside what is computed. All ranks meet before they read, as each must be filled, and after it,
    as then it may be filled anew: which happens once the stream that computes has waited for the message.

    Args:
        group: ranks of one node.

    Raises:
        UserError: they are not.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self.size, self._rank = group, group.size(), group.rank()
        hosts: list[str] = gather_values(socket.gethostname(), group)
        if len(set(hosts)) > 1:
            raise UserError(
                "parallel.context_transport",
                f"copy_engine, and ranks of a context-parallel group are on the hosts {', '.join(sorted(set(hosts)))}",
                "choose nccl, or a tensor * context that divides the GPUs of a node",
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = torch.cuda.Stream(priority=-1)
        self._free: list[_Outbox] = []

    def send(self, parts_nx: Tensor) -> Sent:
        """See `Transport`; the first messages of a size wait for all ranks, to share memory for them."""
        outbox = self._take(parts_nx.nbytes)
        outgoing = outbox.of(self._rank, parts_nx)
        received_nx = parts_nx.new_empty(parts_nx.shape)
        parts, received = parts_nx.unbind(), received_nx.unbind()
        in_order = parts_nx.is_contiguous()

        def pack() -> None:
            for rank in range(self.size):
                (received if rank == self._rank else outgoing)[rank].copy_(parts[rank])

        if not in_order:
            pack()
        self._stream.wait_stream(torch.cuda.current_stream())
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            if in_order:
                pack()
            outbox.meet()
            for step in range(1, self.size):  # no two ranks begin with the same one
                rank = (self._rank + step) % self.size
                received[rank].copy_(outbox.of(rank, parts_nx)[self._rank])
            outbox.meet()
            arrived.record()

        def wait(_kept: Tensor | None = parts_nx if in_order else None) -> None:  # it may be read until then
            torch.cuda.current_stream().wait_event(arrived)
            self._free.append(outbox)

        return Sent(received_nx, wait)

    def _take(self, num_bytes: int) -> _Outbox:
        """The smallest that is free and large enough: the same on all ranks, as their messages are."""
        fitting = [box for box in self._free if box.num_bytes >= num_bytes]
        if not fitting:
            return _Outbox(num_bytes, self._group, self._device)
        chosen = min(fitting, key=lambda box: box.num_bytes)
        self._free.remove(chosen)
        return chosen


@cache
def transport_of(group: ProcessGroup, name: TransportName) -> Transport:
    """What takes parts between the ranks of a group, one for all layers; see `ParallelConfig.context_transport`.

    A collective call where it is the first of its kind for the group.
    """
    return CopyEngines(group) if name == "copy_engine" else Collective(group)


def forget_transports() -> None:
    """Let go of the memory of groups that are no longer."""
    transport_of.cache_clear()
