"""Recurrent states of a sequence that is sharded over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import gather_sequence

Scan = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Scan from values [b, t, h, e] and the initial state [b, h, d, e] (None: zeros) to outputs and the final state."""

DiagonalScan = Callable[[Tensor | None], tuple[Tensor, Tensor]]
"""Scan from the initial state (None: zeros) to outputs and the final state."""


def context_parallel_scan(scan: Scan, v_bthe: Tensor, key_dim: int, group: ProcessGroup) -> Tensor:
    """Run a scan over the whole sequence and return the outputs of this rank's shard.

    A scan over a shard from the state S yields the outputs N S + O and the final state M S + W, separately for each
    column of the values. One scan over the values [v | 0] from the state [0 | I] therefore yields the outputs [O | N]
    and the final state [W | M]. The ranks all-gather W and M, from which each rank computes the initial state of its
    shard. The backward pass uses the same exchange.

    Args:
        scan: scan over this rank's shard with the shard's keys; jointly linear in values and state.
        v_bthe: values of this rank's shard [b, t, h, e].
        key_dim: d, the number of rows of a state.
        group: context-parallel group; rank r has shard r.

    Returns:
        [b, t, h, e] in the dtype of the scan's outputs.
    """
    b, t, h, e = v_bthe.shape
    identity = torch.eye(key_dim, device=v_bthe.device).expand(b, h, -1, -1)
    outputs, last = scan(
        torch.cat([v_bthe, v_bthe.new_zeros(b, t, h, key_dim)], -1),
        torch.cat([identity.new_zeros(b, h, key_dim, e), identity], -1),
    )

    def apply_shard(summary: Tensor, state: Tensor) -> Tensor:
        return summary[..., e:] @ state + summary[..., :e]

    state = _initial_state(last, apply_shard, torch.zeros_like(last[..., :e]), group)
    out_from_zeros, state_factors = (x.transpose(1, 2).flatten(0, 1) for x in outputs.split([e, key_dim], -1))
    # baddbmm rounds the sum of both terms only once.
    out = torch.baddbmm(out_from_zeros, state_factors, state.to(outputs.dtype).flatten(0, 1))
    return out.unflatten(0, (b, h)).transpose(1, 2)


def diagonal_state_before(decay: Tensor, written: Tensor, group: ProcessGroup) -> Tensor:
    """Return the state at the beginning of this rank's shard; zeros on the first rank.

    The state is updated elementwise: this rank's shard maps the state S to decay * S + W. The caller must scan its
    shard again from the result. The method of `context_parallel_scan` needs no second scan, but it would have to store
    the contribution of S to each token's output, which takes as much memory as the states of all tokens.

    Args:
        decay: factor by which this shard multiplies each element of the state, of any shape.
        written: W, the final state of this shard from zeros, of the shape of `decay`.
        group: context-parallel group; rank r has shard r.
    """

    def apply_shard(summary: Tensor, state: Tensor) -> Tensor:
        return summary[0] * state + summary[1]

    return _initial_state(torch.stack([decay, written]), apply_shard, torch.zeros_like(written), group)


def _initial_state(
    summary: Tensor, apply_shard: Callable[[Tensor, Tensor], Tensor], state: Tensor, group: ProcessGroup
) -> Tensor:
    """Compute the initial state of this rank's shard.

    Args:
        summary: summary of this rank's shard.
        apply_shard: function from a shard's summary and initial state to the shard's final state.
        state: initial state of the first shard.
        group: context-parallel group; rank r has shard r.
    """
    # Every rank uses all summaries, because all ranks must take part in the exchange of the backward pass.
    initial_states = [state]
    for shard_summary in gather_sequence(summary[None], group)[:-1]:
        initial_states.append(apply_shard(shard_summary, initial_states[-1]))
    return torch.stack(initial_states)[group.rank()]


def previous_rows(x_tbuw: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return the last rows of the previous rank's shard, zeros on the first rank: [count, b, u, w].

    Args:
        x_tbuw: this rank's sequence shard [t, b, u, w].
        count: number of rows; nothing is exchanged for 0.
        group: ranks that have the shards, in order.

    Raises:
        ValueError: a shard has fewer than `count` rows.
    """
    if count == 0:
        return x_tbuw[:0]
    if len(x_tbuw) < count:
        raise ValueError(
            f"a sequence shard has {len(x_tbuw)} positions, but the convolution needs {count} previous positions; "
            "reduce parallel.context, or set parallel.context_exchange=heads"
        )
    last_rows = gather_sequence(x_tbuw[len(x_tbuw) - count :], group)
    return torch.cat([torch.zeros_like(last_rows[:count]), last_rows]).narrow(0, group.rank() * count, count)
