"""Forward passes through all pipeline stages without Megatron's schedule, for decoding.

A decode cache belongs to one batch, so that several micro-batches cannot be in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_ext.parallel.watchdog import record_progress


class Stages:
    """Sequential execution of the model chunks of all pipeline stages.

    Args:
        chunks: model chunks of this rank, in the order of execution.
        group: pipeline-parallel group.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup) -> None:
        self._chunks, self._group = list(chunks), group

    def __call__(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """Run a forward pass; collective over the group.

        Args:
            tokens_bt: int64 [b, t], the same on all ranks.
            positions_bt: int64 [b, t].

        Returns:
            Output of the last chunk of this rank. On the last stage this is the output of the model.
        """
        record_progress()
        rank, last = self._group.rank(), self._group.size() - 1
        for index, chunk in enumerate(self._chunks):
            if rank or index:
                unwrap_model(chunk).set_input_tensor(self._receive(tokens_bt))
            output: Tensor = chunk(tokens_bt, positions_bt, attention_mask=None)
            if rank < last or index < len(self._chunks) - 1:
                dist.send(output.contiguous(), self._neighbour(1), group=self._group)
        return output

    def _receive(self, tokens_bt: Tensor) -> Tensor:
        b, t = tokens_bt.shape
        config = get_model_config(self._chunks[0])
        hidden_tbh = torch.empty(t, b, config.hidden_size, dtype=config.pipeline_dtype, device=tokens_bt.device)
        dist.recv(hidden_tbh, self._neighbour(-1), group=self._group)
        return hidden_tbh

    def _neighbour(self, step: int) -> int:
        """Return the global rank of a neighboring stage. The first stage, with its next chunk, follows the last."""
        return dist.get_global_rank(self._group, (self._group.rank() + step) % self._group.size())

    def broadcast_from_last(self, output: Tensor) -> Tensor:
        """Broadcast `output` from the last stage to all stages; collective over the group.

        Args:
            output: tensor of the same shape and dtype on every rank. Overwritten except on the last stage.

        Returns:
            The tensor of the last stage.
        """
        if self._group.size() > 1:
            dist.broadcast(output, dist.get_process_group_ranks(self._group)[-1], group=self._group)
        return output
