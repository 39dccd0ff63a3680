"""Handing on along ranks each of which holds a contiguous part of the sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.exchange import gather_sequence

Walk = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""From values [b, t, h, e] and the state before them [b, h, d, e], None for zeros, to outputs and the state after."""

DiagonalWalk = Callable[[Tensor | None], tuple[Tensor, Tensor]]
"""From the state before, None for zeros, to outputs and the state after them."""


def walk_by_parts(walk: Walk, v_bthe: Tensor, key_dim: int, group: ProcessGroup) -> Tensor:
    """What a walk over the whole sequence gives for this rank's part.

    A walk from the state S gives N S + O and ends in M S + W, each column of values by itself. So one walk over the
    values [v | 0] from the state [0 | I] gives [O | N] and ends in [W | M]; every rank tells the others W and M, and
    puts together the state before its part. The gradient goes the same way back.

    Args:
        walk: over this rank's part, an op with keys of its own; linear in values and state together.
        v_bthe: values of this rank's part [b, t, h, e].
        key_dim: d.
        group: context-parallel group; rank r holds part r.

    Returns:
        [b, t, h, e] in the dtype of the walk's outputs.
    """
    b, t, h, e = v_bthe.shape
    identity = torch.eye(key_dim, device=v_bthe.device).expand(b, h, -1, -1)
    given, last = walk(
        torch.cat([v_bthe, v_bthe.new_zeros(b, t, h, key_dim)], -1),
        torch.cat([identity.new_zeros(b, h, key_dim, e), identity], -1),
    )

    def after(summary: Tensor, state: Tensor) -> Tensor:
        return summary[..., e:] @ state + summary[..., :e]

    state = _put_together(last, after, torch.zeros_like(last[..., :e]), group)
    from_zeros, of_state = (x.transpose(1, 2).flatten(0, 1) for x in given.split([e, key_dim], -1))
    # In one product the sum is rounded once.
    out = torch.baddbmm(from_zeros, of_state, state.to(given.dtype).flatten(0, 1))
    return out.unflatten(0, (b, h)).transpose(1, 2)


def diagonal_state_before(kept: Tensor, written: Tensor, group: ProcessGroup) -> Tensor:
    """The state that the parts before this rank's leave behind, zeros on the first rank.

    Each number of a state goes by itself: what this rank's part makes of S is kept S + W. What each token reads from
    the state would be as large as the states of all tokens here, so that, other than in `walk_by_parts`, the part is
    walked over again.

    Args:
        kept: how much of each number this part keeps, of any shape.
        written: W, the state after this part from zeros.
        group: context-parallel group; rank r holds part r.
    """

    def after(summary: Tensor, state: Tensor) -> Tensor:
        return summary[0] * state + summary[1]

    return _put_together(torch.stack([kept, written]), after, torch.zeros_like(written), group)


def _put_together(
    summary: Tensor, after: Callable[[Tensor, Tensor], Tensor], state: Tensor, group: ProcessGroup
) -> Tensor:
    """The state before this rank's part, from every rank's summary and the state before the first."""
    # All of them on every rank: backward, all ranks must take part in the exchange.
    before = [state]
    for of_part in gather_sequence(summary[None], group)[:-1]:
        before.append(after(of_part, before[-1]))
    return torch.stack(before)[group.rank()]


def rows_before(x_tbuw: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """The last rows of the part before this rank's, zeros on the first rank: [count, b, u, w].

    Args:
        x_tbuw: this rank's part of the sequence [t, b, u, w].
        count: how many; nothing is exchanged for 0.
        group: ranks that hold the parts, in order.

    Raises:
        ValueError: the parts are shorter than that.
    """
    if count == 0:
        return x_tbuw[:0]
    if len(x_tbuw) < count:
        raise ValueError(
            f"a part of the sequence has {len(x_tbuw)} positions, and the convolution looks back {count}: "
            "lower parallel.context, or set parallel.context_exchange=heads"
        )
    tails = gather_sequence(x_tbuw[len(x_tbuw) - count :], group)
    return torch.cat([torch.zeros_like(tails[:count]), tails]).narrow(0, group.rank() * count, count)
