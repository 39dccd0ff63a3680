"""Fast snapshot of the state at a save, with a deferred copy to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.platform.device import Platform

FetchToHost = Callable[[], list[Tensor]]
"""Function that returns the copies in host memory. It may block, so a background thread calls it."""

_MAX_QUEUED_BYTES = 16 << 20
"""Bytes of queued transfers to the host at which `_fetch` waits for their completion."""

_MAX_MEMORY_FRACTION = 0.95
"""Maximum fraction of GPU memory that training and a snapshot may use together."""


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
        self._is_on_device: bool | None = None

    def copy(self, tensors: Sequence[Tensor]) -> FetchToHost:
        """Snapshot 1-D tensors. The tensors may be changed after this returns.

        Earlier snapshots are overwritten and must no longer be in use.
        """
        if not tensors:  # other data-parallel ranks write all of this rank's state
            return lambda: []
        if not self._platform.is_cuda:
            self._allocate_host(tensors)
            torch._foreach_copy_(self._host, list(tensors))
            return lambda: self._host
        if self._fits_on_device(tensors):
            return self._copy_on_device(tensors)
        self._allocate_host(tensors)
        torch._foreach_copy_(self._host, list(tensors), non_blocking=True)
        self._platform.synchronize()
        return lambda: self._host

    def _allocate_host(self, tensors: Sequence[Tensor]) -> None:
        if [(t.numel(), t.dtype) for t in self._host] != [(t.numel(), t.dtype) for t in tensors]:
            self._host = []
            # Each tensor has its own storage, because torch.save writes whole storages.
            self._host = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=self._platform.is_cuda) for t in tensors]

    def _fits_on_device(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether a snapshot fits into device memory. Decided at the first save.

        At later saves, the peak memory of training includes the snapshots.
        """
        if self._is_on_device is None:
            device = self._platform.device
            peak = torch.cuda.max_memory_reserved(device) + sum(t.nbytes for t in tensors)
            self._is_on_device = peak < _MAX_MEMORY_FRACTION * torch.cuda.mem_get_info(device)[1]
        return self._is_on_device

    def _copy_on_device(self, tensors: Sequence[Tensor]) -> FetchToHost:
        copies = _copy_on_device_grouped(tensors)
        copied = torch.cuda.Event()
        copied.record()

        def fetch_to_host() -> list[Tensor]:
            self._allocate_host(copies)
            stream = torch.cuda.Stream(self._platform.device)
            with torch.cuda.stream(stream):
                stream.wait_event(copied)
                self._fetch(copies, stream)
            copies.clear()
            return self._host

        return fetch_to_host

    def _fetch(self, copies: Sequence[Tensor], stream: torch.cuda.Stream) -> None:
        """Copy snapshots to the host, at most about `_MAX_QUEUED_BYTES` at a time.

        The device has one transfer queue. More queued transfers would delay the kernels of a training step.
        """
        queued_bytes = 0
        for host, copy in zip(self._host, copies, strict=True):
            host.copy_(copy, non_blocking=True)
            queued_bytes += copy.nbytes
            if queued_bytes >= _MAX_QUEUED_BYTES:
                stream.synchronize()
                queued_bytes = 0
        stream.synchronize()


def _copy_on_device_grouped(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the tensors on their device. Tensors of equal dtype share an allocation and are copied by few kernels."""
    copy_by_index: dict[int, Tensor] = {}
    indices_by_type: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, t in enumerate(tensors):
        indices_by_type.setdefault((t.dtype, t.device), []).append(index)
    for (dtype, device), indices in indices_by_type.items():
        sizes = [tensors[index].numel() for index in indices]  # faster than len(), and training waits for it
        copies = torch.empty(sum(sizes), dtype=dtype, device=device).split(sizes)
        torch._foreach_copy_(copies, [tensors[index] for index in indices])
        copy_by_index.update(zip(indices, copies, strict=True))
    return [copy_by_index[index] for index in range(len(tensors))]
