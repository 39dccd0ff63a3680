"""Log-probabilities and the likeliest token over a vocabulary that tensor-parallel ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

ROWS = 1024
"""Positions whose logits are there at a time; a vocabulary of 50,000 takes 200 MB for them in fp32."""


class Vocabulary:
    """The output side of a model.

    Args:
        size: tokens to choose from; rows beyond it only fill the matrix up.
        group: ranks that hold its rows, in order, as many each.
    """

    def __init__(self, size: int, group: dist.ProcessGroup) -> None:
        self.size, self._group = size, group

    def ask(self, hidden_nh: Tensor, weight_vh: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        """How likely tokens are, and which is the likeliest; a collective call, n the same on all ranks of the group.

        Args:
            hidden_nh: what the model has made of n positions.
            weight_vh: this rank's rows of the output layer.
            targets_n: int64, tokens whose probability is asked for.

        Returns:
            float64 [n] log-probabilities in nats, by logits in the model's precision and a softmax in fp32; int64 [n]
            likeliest tokens, the lowest one of equals.
        """
        parts = zip(hidden_nh.to(weight_vh.dtype).split(ROWS), targets_n.split(ROWS), strict=True)
        answers = [self._ask(rows_nh @ weight_vh.T, rows_n) for rows_nh, rows_n in parts]
        if not len(targets_n):
            return targets_n.double(), targets_n
        log_p, best = zip(*answers, strict=True)
        return torch.cat(log_p), torch.cat(best)

    def logits(self, hidden_nh: Tensor, weight_vh: Tensor) -> Tensor:
        """Logits [n, v] in fp32 on every rank of the group, of few positions; a collective call, see `ask`."""
        own_nv = (hidden_nh.to(weight_vh.dtype) @ weight_vh.T).float().contiguous()
        parts = [torch.empty_like(own_nv) for _ in range(self._group.size())]
        dist.all_gather(parts, own_nv, group=self._group)
        return torch.cat(parts, dim=1)[:, : self.size]

    def _ask(self, logits_nv: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits_nv.shape[1]
        first = self._group.rank() * rows
        tokens_v = torch.arange(first, first + rows, device=logits_nv.device)
        logits_nv = logits_nv.float().masked_fill(tokens_v >= self.size, -torch.inf)
        largest_n = self._over_ranks(logits_nv.amax(1), dist.ReduceOp.MAX)
        total_n = self._over_ranks((logits_nv - largest_n[:, None]).exp().sum(1), dist.ReduceOp.SUM)
        is_here = (targets_n >= first) & (targets_n < first + rows)
        here_n = logits_nv.gather(1, (targets_n - first).clamp(0, rows - 1)[:, None])[:, 0]
        target_n = self._over_ranks(torch.where(is_here, here_n, 0.0), dist.ReduceOp.SUM)
        best_nv = torch.where(logits_nv == largest_n[:, None], tokens_v, self.size)
        best_n = self._over_ranks(best_nv.amin(1), dist.ReduceOp.MIN)
        return (target_n - largest_n - total_n.log()).double(), best_n

    def _over_ranks(self, values_n: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        values_n = values_n.contiguous()
        dist.all_reduce(values_n, operation, group=self._group)
        return values_n
