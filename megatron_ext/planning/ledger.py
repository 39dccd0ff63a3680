"""Ledger of a step on meta tensors: memory by purpose, and messages between ranks."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kernels.meta.fused_call import within_one_kernel
from megatron_ext.model.step_parts import COMMUNICATION

BLOCK_SIZE = 512
"""Granularity in bytes of torch's caching allocator."""

ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
QUERY_GRADIENT_BYTES = 4
"""Additional bytes per query element in attention's backward pass: kernels sum the query gradients in fp32."""

ADD_PRODUCT = torch.ops.aten.addmm.dtype_out
"""Matrix product added to a tensor of another dtype. torch 2.11 raises a TypeError for it on the meta device."""

POINT_TO_POINT = ("send", "recv_")


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
        allocated: bytes allocated now, by purpose.
        total: sum of `allocated`.
        peak: maximum of `total`.
        at_peak: `allocated` at the peak.
        messages: number of messages by kind.
    """

    allocated: Counter[Purpose] = field(default_factory=Counter)
    total: int = 0
    peak: int = 0
    at_peak: dict[Purpose, int] = field(default_factory=dict)
    messages: Counter[Message] = field(default_factory=Counter)

    def allocate(self, purpose: Purpose, size: int) -> None:
        """Record an allocation."""
        self.allocated[purpose] += size
        self.total += size
        if self.total > self.peak and not within_one_kernel():
            self.peak, self.at_peak = self.total, dict(self.allocated)

    def free(self, purpose: Purpose, size: int) -> None:
        """Record the release of an allocation."""
        self.allocated[purpose] -= size
        self.total -= size


class LedgerMode(TorchDispatchMode):
    """Dispatch mode that records meta tensors and collectives in a ledger, and creates new tensors on the meta device.

    Args:
        ledger: ledger to record in.
        purpose: function that returns the purpose of the current computation.
    """

    def __init__(self, ledger: Ledger, purpose: Callable[[], Purpose]) -> None:
        super().__init__()
        self._ledger, self._purpose = ledger, purpose
        self._entries: dict[int, tuple[Purpose, int] | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from wrapping `__torch_dispatch__`, which costs time and is only needed when code is compiled."""
        return False

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Exclude tensors that exist before the step, such as weights, from the ledger."""
        self._entries |= {x.untyped_storage()._cdata: None for x in tensors}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        op_kwargs = dict(kwargs or {})
        if _creates_tensor(func, args):
            op_kwargs["device"] = torch.device("meta")
        skipped = func is ADD_PRODUCT and op_kwargs["out"].is_meta
        result = op_kwargs["out"] if skipped else func(*args, **op_kwargs)
        for leaf in (result,) if isinstance(result, Tensor) else tree_iter(result):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self._record_storage(leaf.untyped_storage())
        if func is ATTENTION_BACKWARD:
            workspace = QUERY_GRADIENT_BYTES * args[1].numel()
            self._ledger.allocate(self._purpose(), workspace)
            self._ledger.free(self._purpose(), workspace)
        if func in collective_ops and func not in sync_ops:
            self._record_message(func, args)
        return result

    def _record_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._entries:
            return
        purpose, size = self._purpose(), -(-storage.nbytes() // BLOCK_SIZE) * BLOCK_SIZE
        self._entries[key] = purpose, size
        self._ledger.allocate(purpose, size)
        weakref.finalize(storage, self._record_release, key)

    def _record_release(self, key: int) -> None:
        entry = self._entries.pop(key)
        assert entry is not None, "tensors that exist before the step are not freed in it"
        self._ledger.free(*entry)

    def _record_message(self, func: Any, args: Sequence[Any]) -> None:
        name = func.overloadpacket.__name__
        ranks = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        if name in POINT_TO_POINT:
            ranks = sorted({dist.get_rank(), ranks[args[2]]})
        if len(ranks) == 1:
            return
        size = max(_num_bytes(arg) for arg in args[:2])
        self._ledger.messages[Message(name, tuple(ranks), size)] += 1
        for x in tree_iter(args[0]):
            if isinstance(x, Tensor):
                self._assign_to_communication(x.untyped_storage()._cdata)

    def _assign_to_communication(self, key: int) -> None:
        """Reassign memory that receives data from other ranks to communication."""
        entry = self._entries.get(key)
        if entry is not None:
            purpose, size = entry
            new_purpose = purpose._replace(part=COMMUNICATION)
            self._entries[key] = new_purpose, size
            self._ledger.allocated[purpose] -= size
            self._ledger.allocated[new_purpose] += size


def _creates_tensor(func: Any, args: Sequence[Any]) -> bool:
    """Return True if an operation creates a tensor from no other tensor and has a device argument."""
    return _has_device_argument(func) and not any(isinstance(leaf, Tensor) for leaf in tree_iter(args))


@cache
def _has_device_argument(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _num_bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_iter(tensors) if isinstance(x, Tensor))
