"""Ledger of a step on meta tensors: memory by purpose, and messages between ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kernels.meta.fused_call import within_one_kernel
from megatron_ext.model.step_parts import COMMUNICATION

BLOCK = 512
"""Granularity in bytes of torch's caching allocator."""

ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
QUERY_GRADIENT_BYTES = 4
"""Additional bytes per query element in attention's backward pass: kernels sum the query gradients in fp32."""

TO_ONE = ("send", "recv_")


class Purpose(NamedTuple):
    """Purpose for which memory is allocated.

    Attributes:
        part: model part as named by `selectron bench train`, or communication.
        layer: layer number in the whole model, from 1; None outside of layers.
        phase: forward or backward pass. Recomputation belongs to the backward pass.
    """

    part: str
    layer: int | None
    phase: str


class Message(NamedTuple):
    """Kind of collective call.

    Attributes:
        call: name of the c10d operator, e.g. `allreduce_`.
        ranks: global ranks of the group; for a point-to-point message, the two ranks.
        size: bytes of the whole tensor that is reduced, gathered or exchanged, on one rank.
    """

    call: str
    ranks: tuple[int, ...]
    size: int


@dataclass
class Ledger:
    """Resources used by a step so far.

    Attributes:
        held: bytes allocated now, by purpose.
        total: sum of `held`.
        peak: maximum of `total`.
        at_peak: `held` at the peak.
        messages: number of messages by kind.
    """

    held: Counter[Purpose] = field(default_factory=Counter)
    total: int = 0
    peak: int = 0
    at_peak: dict[Purpose, int] = field(default_factory=dict)
    messages: Counter[Message] = field(default_factory=Counter)

    def take(self, purpose: Purpose, size: int) -> None:
        """Record an allocation."""
        self.held[purpose] += size
        self.total += size
        if self.total > self.peak and not within_one_kernel():
            self.peak, self.at_peak = self.total, dict(self.held)

    def give_back(self, purpose: Purpose, size: int) -> None:
        """Record the release of an allocation."""
        self.held[purpose] -= size
        self.total -= size


class Watched(TorchDispatchMode):
    """Dispatch mode that records meta tensors and collectives in a ledger, and creates new tensors on the meta device.

    Args:
        ledger: ledger to record in.
        purpose: function that returns the purpose of the current computation.
    """

    def __init__(self, ledger: Ledger, purpose: Callable[[], Purpose]) -> None:
        super().__init__()
        self._ledger, self._purpose = ledger, purpose
        self._known: dict[int, tuple[Purpose, int] | None] = {}

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that exist before the step, such as weights, from the ledger."""
        self._known |= {x.untyped_storage()._cdata: None for x in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if _makes_a_tensor(func, args):
            given["device"] = torch.device("meta")
        result = func(*args, **given)
        for leaf in tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._note(leaf.untyped_storage())
        if func is ATTENTION_BACKWARD:
            workspace = QUERY_GRADIENT_BYTES * args[1].numel()
            self._ledger.take(self._purpose(), workspace)
            self._ledger.give_back(self._purpose(), workspace)
        if func in collective_ops and func not in sync_ops:
            self._note_message(func, args)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        purpose, size = self._purpose(), -(-storage.nbytes() // BLOCK) * BLOCK
        self._known[key] = purpose, size
        self._ledger.take(purpose, size)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        noted = self._known.pop(key)
        assert noted is not None, "what was there before the step stays"
        self._ledger.give_back(*noted)

    def _note_message(self, func: Any, args: Sequence[Any]) -> None:
        name = func.overloadpacket.__name__
        ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        if name in TO_ONE:
            ranks = sorted({dist.get_rank(), ranks[args[2]]})
        if len(ranks) == 1:
            return
        size = max(_bytes_of(arg) for arg in args[:2])
        self._ledger.messages[Message(name, tuple(ranks), size)] += 1
        for x in tree_iter(args[0]):
            if isinstance(x, Tensor):
                self._move(x.untyped_storage()._cdata)

    def _move(self, key: int) -> None:
        """Reassign memory that receives data from other ranks to communication."""
        noted = self._known.get(key)
        if noted is not None:
            purpose, size = noted
            moved = purpose._replace(part=COMMUNICATION)
            self._known[key] = moved, size
            self._ledger.held[purpose] -= size
            self._ledger.held[moved] += size


def _makes_a_tensor(func: Any, args: Sequence[Any]) -> bool:
    """Return True if an operation creates a tensor from no other tensor and has a device argument."""
    if any(isinstance(leaf, Tensor) for leaf in tree_iter(args)):
        return False
    return any(argument.name == "device" for argument in func._schema.arguments)


def _bytes_of(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_iter(tensors) if isinstance(x, Tensor))
