"""A copy of the state as it is at a save, made so fast that training hardly notices, and brought to the host later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.platform import Platform

OnHost = Callable[[], list[Tensor]]
"""Gives the copies, in host memory; waits for them if need be, so it is for another thread to call."""

_AT_ONCE = 16 << 20
"""Bytes given to the bus before it is waited for."""

_FILLED = 0.95
"""Part of a GPU's memory that training and a copy may take together."""


class Staging:
    """Copies the tensors of one run's saves; its host memory is kept from save to save, as large as they are.

    On a GPU the copy is made on the device, by kernels that the training stream takes in order: whatever changes the
    tensors later finds it done. It is brought to pinned memory on a stream of its own, which a training step does not
    wait for, and freed. Where the device has no room for it beside training, the copy goes to pinned memory at once,
    and the save takes as long as the bus does.

    Args:
        platform: where the tensors are.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._host: list[Tensor] = []
        self._on_device: bool | None = None

    def copy(self, tensors: Sequence[Tensor]) -> OnHost:
        """Copy tensors, 1-D; from the return on they may be changed.

        The copies before are overwritten: they must no longer be in use.
        """
        if not tensors:  # other data-parallel ranks write all that this one has
            return lambda: []
        if not self._platform.is_cuda:
            self._make_room(tensors)
            torch._foreach_copy_(self._host, list(tensors))
            return lambda: self._host
        if self._has_room_on_device(tensors):
            return self._copy_on_device(tensors)
        self._make_room(tensors)
        torch._foreach_copy_(self._host, list(tensors), non_blocking=True)
        self._platform.synchronize()
        return lambda: self._host

    def _make_room(self, tensors: Sequence[Tensor]) -> None:
        if [(t.numel(), t.dtype) for t in self._host] != [(t.numel(), t.dtype) for t in tensors]:
            self._host = []
            # Each has a storage of its own: torch.save writes storages whole.
            self._host = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=self._platform.is_cuda) for t in tensors]

    def _has_room_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Asked once: later the memory that training has taken includes that of copies."""
        if self._on_device is None:
            device = self._platform.device
            taken = torch.cuda.max_memory_reserved(device) + sum(t.nbytes for t in tensors)
            self._on_device = taken < _FILLED * torch.cuda.mem_get_info(device)[1]
        return self._on_device

    def _copy_on_device(self, tensors: Sequence[Tensor]) -> OnHost:
        copies = _copies(tensors)
        copied = torch.cuda.Event()
        copied.record()

        def on_host() -> list[Tensor]:
            self._make_room(copies)
            stream = torch.cuda.Stream(self._platform.device)
            with torch.cuda.stream(stream):
                stream.wait_event(copied)
                self._fetch(copies, stream)
            copies.clear()
            return self._host

        return on_host

    def _fetch(self, copies: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        """Bring copies to the host, a few at a time: more would hold up a step's kernels in the device's one queue."""
        waiting = 0
        for host, copy in zip(self._host, copies, strict=True):
            host.copy_(copy, non_blocking=True)
            waiting += copy.nbytes
            if waiting >= _AT_ONCE:
                stream.synchronize()
                waiting = 0
        stream.synchronize()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """A copy of each, beside it: those of one type in one piece of memory and by few kernels, not by hundreds."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, t in enumerate(tensors):
        alike.setdefault((t.dtype, t.device), []).append(number)
    for (dtype, device), numbers in alike.items():
        sizes = [tensors[number].numel() for number in numbers]  # len is slower, and training waits
        copies = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        torch._foreach_copy_(copies, [tensors[number] for number in numbers])
        found.update(zip(numbers, copies, strict=True))
    return [found[number] for number in range(len(tensors))]
