"""Pieces of texts through all pipeline stages, outside of Megatron's schedule: what layers remember is of one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from megatron_ext.parallel.watchdog import alive


class Stages:
    """The model chunks of all pipeline stages, one after the other.

    Args:
        chunks: of this rank, in the order in which a text goes through them.
        group: pipeline-parallel ranks.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], group: dist.ProcessGroup) -> None:
        self._chunks, self._group = list(chunks), group

    def __call__(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        """Forward pass; a collective call of the group.

        Args:
            tokens_bt: int64 [b, t], the same on all ranks.
            positions_bt: int64 [b, t].

        Returns:
            What the last chunk of this rank gives: on the last stage the model's answer.
        """
        alive()
        rank, last = self._group.rank(), self._group.size() - 1
        for number, chunk in enumerate(self._chunks):
            if rank or number:
                unwrap_model(chunk).set_input_tensor(self._receive(tokens_bt))
            answer: Tensor = chunk(tokens_bt, positions_bt, attention_mask=None)
            if rank < last or number < len(self._chunks) - 1:
                dist.send(answer.contiguous(), self._neighbour(1), group=self._group)
        return answer

    def _receive(self, tokens_bt: Tensor) -> Tensor:
        b, t = tokens_bt.shape
        config = get_model_config(self._chunks[0])
        hidden_tbh = torch.empty(t, b, config.hidden_size, dtype=config.pipeline_dtype, device=tokens_bt.device)
        dist.recv(hidden_tbh, self._neighbour(-1), group=self._group)
        return hidden_tbh

    def _neighbour(self, step: int) -> int:
        """Global rank; the last stage's next one is the first, with its next chunk."""
        return dist.get_global_rank(self._group, (self._group.rank() + step) % self._group.size())

    def said_by_last(self, answer: Tensor) -> Tensor:
        """What the last stage gives for `answer`, on every stage; a collective call of the group.

        Args:
            answer: on other ranks of the same shape and type; overwritten.
        """
        if self._group.size() > 1:
            dist.broadcast(answer, dist.get_process_group_ranks(self._group)[-1], group=self._group)
        return answer
