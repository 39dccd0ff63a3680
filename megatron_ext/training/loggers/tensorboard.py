"""TensorBoard event files in the run folder."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_ext.run_folder.layout import TENSORBOARD
from megatron_ext.training.loggers.core.base import Logger, Start, scalars
from megatron_ext.training.loggers.core.registry import register

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


@register("tensorboard")
class TensorBoard(Logger):
    """Write scalars with the tags of `base.scalars`."""

    _writer: SummaryWriter | None = None

    def start(self, start: Start) -> None:
        """Open an event file that replaces later steps. Without event files (new branch), it gets all records."""
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _ignore_writer_thread
        self.close()
        folder = self.run.folder / TENSORBOARD
        has_events = any(folder.glob("events.*"))
        self._writer = SummaryWriter(str(folder), purge_step=start.step + 1 if has_events else 1)
        if not has_events:
            for name, record in start.history():
                self.log(scalars(name, record), int(record["step"]))
            self._writer.flush()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write each value as a scalar."""
        assert self._writer is not None, "started"
        for tag, value in metrics.items():
            self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Flush the event file, which is otherwise written every two minutes."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.flush()  # raises the write errors of its thread; closing does not
            self._writer.close()


def _ignore_writer_thread(failed: threading.ExceptHookArgs) -> None:
    """Ignore errors of TensorBoard's writer thread: its next call raises them, so a traceback would be a repetition."""
    from tensorboard.summary.writer.event_file_writer import _AsyncWriterThread

    if not isinstance(failed.thread, _AsyncWriterThread):
        threading.__excepthook__(failed)
