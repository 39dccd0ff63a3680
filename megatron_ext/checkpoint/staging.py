"""Fast snapshot of the state at a save, with a deferred copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.platform.device import Platform

OnHost = Callable[[], list[Tensor]]
"""Function that returns the copies in host memory. It may block, so a background thread calls it."""

_AT_ONCE = 16 << 20
"""Number of bytes of queued transfers to the host after which `_fetch` waits for their completion."""

_FILLED = 0.95
"""Maximum fraction of GPU memory that training and the copies may use together."""


class Staging:
    """Snapshots of the tensors of a run's saves. The host buffers, as large as the tensors, are reused by all saves.

    On a GPU the snapshot is taken on the device, by kernels on the training stream, so that later changes of the
    tensors do not affect the snapshot. A separate stream then copies the snapshot to pinned host memory, while training
    continues, and the device copy is freed. If the device has too little free memory for the snapshot, the tensors are
    copied to pinned host memory directly. The save then blocks for the whole transfer.

    Args:
        platform: platform of the tensors.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._host: list[Tensor] = []
        self._on_device: bool | None = None

    def copy(self, tensors: Sequence[Tensor]) -> OnHost:
        """Snapshot 1-D tensors. The tensors may be changed after this returns.

        Earlier snapshots are overwritten and must no longer be in use.
        """
        if not tensors:  # other data-parallel ranks write all of this rank's state
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
            # Each tensor has its own storage, because torch.save writes whole storages.
            self._host = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=self._platform.is_cuda) for t in tensors]

    def _has_room_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether the device has room for a snapshot, as decided at the first save.

        Later, the peak memory of training includes that of the copies.
        """
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
        """Copy snapshots to the host, a few at a time.

        The device has one transfer queue. More queued transfers would delay the kernels of a training step.
        """
        waiting = 0
        for host, copy in zip(self._host, copies, strict=True):
            host.copy_(copy, non_blocking=True)
            waiting += copy.nbytes
            if waiting >= _AT_ONCE:
                stream.synchronize()
                waiting = 0
        stream.synchronize()


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors on their device. Tensors of equal dtype share an allocation and are copied by few kernels."""
    found: dict[int, Tensor] = {}
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, t in enumerate(tensors):
        alike.setdefault((t.dtype, t.device), []).append(number)
    for (dtype, device), numbers in alike.items():
        sizes = [tensors[number].numel() for number in numbers]  # faster than len(), and training waits for it
        copies = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        torch._foreach_copy_(copies, [tensors[number] for number in numbers])
        found.update(zip(numbers, copies, strict=True))
    return [found[number] for number in range(len(tensors))]
