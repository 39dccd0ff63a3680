"""Log-probabilities and most likely tokens over a vocabulary that is sharded over tensor-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

MAX_ROWS = 1024
"""Positions whose logits are computed at a time; with a vocabulary of 50,000 they take 200 MB in fp32."""


class Vocabulary:
    """Vocabulary whose output rows are sharded over a group.

    Args:
        size: number of tokens; rows of the output layer beyond it are padding.
        group: tensor-parallel group. Each rank holds an equal contiguous share of the rows, in rank order.
    """

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self.size, self._group = size, group

    def score(self, hidden_nh: Tensor, weight_vh: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities of target tokens and the most likely tokens; collective over the group.

        Args:
            hidden_nh: last hidden states [n, hidden_size], n the same on all ranks of the group.
            weight_vh: this rank's rows of the output layer, [v / tp, hidden_size].
            targets_n: int64 [n], tokens whose probability is requested.

        Returns:
            Log-probabilities in nats, float64 [n]: the logits are in the model's precision and the softmax in fp32.
            And the most likely tokens, int64 [n]: the lowest id among equally likely ones.
        """
        chunks = zip(hidden_nh.to(weight_vh.dtype).split(MAX_ROWS), targets_n.split(MAX_ROWS), strict=True)
        scores = [self._score_rows(rows_nh @ weight_vh.T, rows_n) for rows_nh, rows_n in chunks]
        if not len(targets_n):
            return targets_n.double(), targets_n
        log_p, best = zip(*scores, strict=True)
        return torch.cat(log_p), torch.cat(best)

    def logits(self, hidden_nh: Tensor, weight_vh: Tensor) -> Tensor:
        """Gather the logits, fp32 [n, v], of a few positions on every rank; collective, arguments as in `score`."""
        local_nv = (hidden_nh.to(weight_vh.dtype) @ weight_vh.T).float().contiguous()
        shards = [torch.empty_like(local_nv) for _ in range(self._group.size())]
        dist.all_gather(shards, local_nv, group=self._group)
        return torch.cat(shards, dim=1)[:, : self.size]

    def _score_rows(self, logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits_nv.shape[1]
        first = self._group.rank() * rows
        tokens_v = torch.arange(first, first + rows, device=logits_nv.device)
        logits_nv = logits_nv.float().masked_fill(tokens_v >= self.size, -torch.inf)
        largest_n = self._over_ranks(logits_nv.amax(1), dist.ReduceOp.MAX)
        total_n = self._over_ranks((logits_nv - largest_n[:, None]).exp().sum(1), dist.ReduceOp.SUM)
        is_local = (targets_n >= first) & (targets_n < first + rows)
        local_n = logits_nv.gather(1, (targets_n - first).clamp(0, rows - 1)[:, None])[:, 0]
        target_n = self._over_ranks(torch.where(is_local, local_n, 0.0), dist.ReduceOp.SUM)
        best_nv = torch.where(logits_nv == largest_n[:, None], tokens_v, self.size)
        best_n = self._over_ranks(best_nv.amin(1), dist.ReduceOp.MIN)
        return (target_n - largest_n - total_n.log()).double(), best_n

    def _over_ranks(self, values_n: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        values_n = values_n.contiguous()
        dist.all_reduce(values_n, operation, group=self._group)
        return values_n
