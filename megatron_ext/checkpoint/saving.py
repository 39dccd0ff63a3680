"""Write a checkpoint in the background while training continues.

Slow work runs in a thread, rather than in a forked process as in Megatron. A forked process may deadlock on a lock that
a gloo, NCCL or CUDA thread held during the fork. It also outlives a killed rank, with its memory and its open output
file, and cannot copy from the GPU. Copies, torch.save and checksums release the GIL for the training thread. While 256
MB were saved, another thread that woke up every half millisecond was never late by more than 7 ms.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    SerializationFormat,
    _StorageWriterTransforms,
    _write_item,
)
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.checkpoint.contents import CheckedFile, FileDigest, compute_digest
from megatron_ext.checkpoint.disk import Failure, NotAsWritten
from megatron_ext.checkpoint.folder import CheckpointFolder, Retention
from megatron_ext.checkpoint.index import Index, encode_results
from megatron_ext.checkpoint.metadata_index import FILE_NAME as INDEX
from megatron_ext.checkpoint.plan import RankPlan
from megatron_ext.checkpoint.staging import FetchToHost
from megatron_ext.parallel.agreement import from_first_rank, gather_on_first
from megatron_ext.utils.atomic_files import fsync_path

FORMAT = CheckpointingConfig("torch_dist", 1)

START_DELAY = 0.03
"""Seconds by which background work is delayed after a save, unless a rank waits for its completion.

At the start of a step, the training thread must launch GPU work, and the background thread would compete with it for
the GIL. Later in the step, the GPU has work queued.
"""


@dataclass(frozen=True)
class WrittenFiles:
    """Files that a rank has written.

    Attributes:
        results: location of each item in the files, as returned by `index.encode_results`.
        files: size and checksum of each file, by name.
    """

    results: str
    files: dict[str, FileDigest]


class _Abandoned(Exception):
    """Signal that the save was abandoned."""


class AsyncSave:
    """Asynchronous save of one checkpoint. Every rank writes its files, then the first rank completes the checkpoint.

    Args:
        folder: checkpoint folder of the run.
        step: step to save.
        plan: items that this rank writes.
        fetch_to_host: function that returns the plan's tensors as they were when the save began.
        index: index writer of the run.
        record_fields: see `CheckpointFolder.complete`.
        retention: rule for which checkpoints are kept once this one is complete.
        executor: executor for background work, with one worker.
        guard: see `CheckpointStore`.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        step: int,
        plan: RankPlan,
        fetch_to_host: FetchToHost,
        index: Index,
        record_fields: dict[str, Any],
        retention: Retention,
        executor: Executor,
        guard: Callable[[], object] | None = None,
    ) -> None:
        self.step, self._guard = step, guard
        self._folder, self._plan, self._fetch_to_host, self._executor = folder, plan, fetch_to_host, executor
        self._index, self._record_fields, self._retention = index, record_fields, retention
        self._abandoned, self._skip_delay = Event(), Event()
        self._common = deepcopy(plan.common)  # training may modify its contents
        self._writing: Future[bytes] = executor.submit(self._write)
        self._finishing: Future[Failure | None] | None = None
        self._all_written = False

    @property
    def is_busy(self) -> bool:
        """True while this rank has background work for this save."""
        return not (self._finishing or self._writing).done()

    def advance(self) -> bool:
        """Start the next phase, or finish the save. A collective call, to be made once no rank is busy.

        Returns:
            True if the checkpoint is complete.

        Raises:
            SaveFailed: a rank could not write. Raised on every rank. The partial checkpoint is removed.
        """
        if not self._all_written:
            self._all_written = True
            results = gather_on_first(self._writing.result())
            if results is not None:
                self._finishing = self._executor.submit(self._finish, results)
            return False
        failure = self._finishing.result() if self._finishing else None
        failure_fields = from_first_rank(None if failure is None else asdict(failure))
        if failure_fields is not None:
            raise SaveFailed(Failure(**failure_fields))
        return True

    def wait(self) -> None:
        """Block until the checkpoint is complete. A collective call, with the errors of `advance`."""
        self._skip_delay.set()
        while not self.advance():
            pass  # each call waits for this rank's work, and its collective for the other ranks

    def abandon(self) -> None:
        """Cancel the save and remove its files. Not a collective call."""
        self._abandoned.set()
        self._skip_delay.set()
        for work in (self._writing, self._finishing):
            if work is not None:
                work.exception()  # waits, and ignores the error
        self._folder.abandon(self.step)

    # --- background thread -------------------------------------------------------------------------------------------

    def _write(self) -> bytes:
        """Write this rank's files. Return a `WrittenFiles` or a `Failure` as JSON.

        The result is encoded in this background thread, so that training does not have to wait for the encoding.
        """
        self._skip_delay.wait(START_DELAY)
        try:
            written: WrittenFiles | Failure = self._write_files(self._folder.partial(self.step))
        except Exception as error:
            written = Failure.from_error(error, self._folder.root)
        return json.dumps(asdict(written)).encode()

    def _write_files(self, partial: Path) -> WrittenFiles:
        partial.mkdir(parents=True, exist_ok=True)
        copies = iter(self._fetch_to_host())
        files = {
            name: [(item, _reshape(item, next(copies)) if data is None else data) for item, data in items]
            for name, items in self._plan.files.items()
        }
        with ThreadPoolExecutor(max(len(files), 1)) as threads:
            written = list(threads.map(lambda name: self._write_file(partial / name, files[name]), files))
        digests = {name: digest for name, (digest, _) in zip(files, written, strict=True)}
        if dist.get_rank() == 0:
            digests[COMMON_STATE_FNAME] = _save_common(partial / COMMON_STATE_FNAME, self._common)
        for name, digest in digests.items():
            self._stop_if_abandoned()
            _verify_file(partial / name, digest)
        return WrittenFiles(encode_results([result for _, results in written for result in results]), digests)

    def _write_file(self, path: Path, items: Sequence[tuple[WriteItem, Any]]) -> tuple[FileDigest, list[WriteResult]]:
        """Write one file of tensors and objects, each in the format of torch.save, which torch's reader expects."""
        transforms, results = _StorageWriterTransforms(), []
        with CheckedFile(path) as file:
            for item, data in items:
                self._stop_if_abandoned()
                results.append(_write_item(transforms, file, data, item, path.name, SerializationFormat.TORCH_SAVE))
        return file.digest, results

    def _stop_if_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned

    def _finish(self, encoded: Sequence[bytes]) -> Failure | None:
        """Write index and record, rename the folder and update `latest`. Runs on the first rank only.

        Args:
            encoded: encoded results of all ranks, as returned by `_write`.
        """
        self._skip_delay.wait(START_DELAY)
        results = [_decode_result(result) for result in encoded]
        failure = next((result for result in results if isinstance(result, Failure)), None)
        if failure is None:
            try:
                self._complete([result for result in results if isinstance(result, WrittenFiles)])
            except Exception as error:
                failure = Failure.from_error(error, self._folder.root)
        if failure is not None:
            self._folder.abandon(self.step)
        return failure

    def _complete(self, results: Sequence[WrittenFiles]) -> None:
        self._stop_if_abandoned()
        partial = self._folder.partial(self.step)
        assert self._plan.metadata is not None
        self._index.write(partial, self._plan.metadata, [result.results for result in results])
        save_config(FORMAT, str(partial))
        fsync_path(partial / CONFIG_FNAME)
        files = {name: digest for result in results for name, digest in result.files.items()}
        files |= {name: compute_digest(partial / name) for name in (INDEX, CONFIG_FNAME)}
        if self._guard is not None:
            self._guard()
        self._folder.complete(self.step, self._record_fields, files, self._retention)


def _decode_result(encoded: bytes) -> WrittenFiles | Failure:
    """Decode a rank's `WrittenFiles` or `Failure`."""
    raw = json.loads(encoded)
    if "trace" in raw:
        return Failure(**raw)
    return WrittenFiles(raw["results"], {name: FileDigest(**digest) for name, digest in raw["files"].items()})


class SaveFailed(Exception):
    """Failure to save a checkpoint.

    Args:
        failure: failure of the first rank that has one.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.trace)
        self.failure = failure


def _reshape(item: WriteItem, flat: Tensor) -> Tensor:
    assert item.tensor_data is not None
    return flat.view(item.tensor_data.chunk.sizes)


def _save_common(path: Path, common: dict[str, Any]) -> FileDigest:
    buffer = io.BytesIO()
    torch.save(common, buffer)
    with CheckedFile(path) as file:
        file.write(buffer.getbuffer())
    return file.digest


def _verify_file(path: Path, written: FileDigest) -> None:
    """Read a file back and compare its size and checksum with those of the data that was written."""
    found = compute_digest(path)
    if found != written:
        raise NotAsWritten(f"{path.name} does not contain what was written to it ({found} instead of {written})")
