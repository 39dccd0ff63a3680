"""Selective scan in plain torch: recurrent (the definition) and chunked (equivalent and faster).

Gu, Dao 2023, "Mamba" (arXiv 2312.00752). Each channel has a state h of n numbers, each with its decay rate in A:

    h <- exp(dt_t A) h + dt_t x_t B_t;  y_t = C_t . h

Suffixes: b batch, t position, s position in a chunk, g group, e channel of a group, n state.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_SIZE = 16


def recurrent(
    x_btge: Tensor, dt_btge: Tensor, A_gen: Tensor, B_btgn: Tensor, C_btgn: Tensor, *, state_bgen: Tensor
) -> tuple[Tensor, Tensor]:
    """Iterate over the tokens.

    Args:
        x_btge: channels [b, t, g, c / g]. All arguments have one dtype, fp32 or float64.
        dt_btge: step sizes, not negative.
        A_gen: rates [g, c / g, n], at most 0.
        B_btgn: input projection [b, t, g, n].
        C_btgn: output projection [b, t, g, n].
        state_bgen: state before the first token [b, g, c / g, n].

    Returns:
        y [b, t, g, c / g] and the state after the last token.
    """
    outputs = []
    for t in range(x_btge.shape[1]):
        decay = (dt_btge[:, t, ..., None] * A_gen).exp()
        update = (dt_btge[:, t] * x_btge[:, t])[..., None] * B_btgn[:, t, :, None]
        state_bgen = decay * state_bgen + update
        outputs.append((state_bgen * C_btgn[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state_bgen


def chunked(
    x_btge: Tensor, dt_btge: Tensor, A_gen: Tensor, B_btgn: Tensor, C_btgn: Tensor, *, state_bgen: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan over chunks; all states of a chunk are computed in parallel.

    The backward pass recomputes them. Between chunks only the state is saved: [b, c, n] per chunk, not per token.

    Args:
        x_btge: channels. Shapes and dtypes are those of `recurrent`.
        dt_btge: step sizes.
        A_gen: decay rates.
        B_btgn: input projection.
        C_btgn: output projection.
        state_bgen: state before the first token.

    Returns:
        y [b, t, g, c / g] and the state after the last token.
    """
    outputs = []
    # Without a backward pass, activation checkpointing would only import torch's compiler, 0.4 s in the first call.
    scan: Callable[..., tuple[Tensor, Tensor]] = _checkpointed_chunk if torch.is_grad_enabled() else _chunk
    for parts in zip(*(y.split(CHUNK_SIZE, dim=1) for y in (x_btge, dt_btge, B_btgn, C_btgn)), strict=True):
        y_bsge, state_bgen = scan(*parts, A_gen, state_bgen)
        outputs.append(y_bsge)
    return torch.cat(outputs, dim=1), state_bgen


def _checkpointed_chunk(*arguments: Tensor) -> tuple[Tensor, Tensor]:
    """Run `_chunk` with activation checkpointing, so that the backward pass recomputes its states."""
    outputs_and_state: tuple[Tensor, Tensor] = checkpoint(
        _chunk, *arguments, use_reentrant=False, preserve_rng_state=False
    )
    return outputs_and_state


def _chunk(
    x_bsge: Tensor, dt_bsge: Tensor, B_bsgn: Tensor, C_bsgn: Tensor, A_gen: Tensor, state_bgen: Tensor
) -> tuple[Tensor, Tensor]:
    decay_bsgen = (dt_bsge[..., None] * A_gen).exp()
    update_bsgen = (dt_bsge * x_bsge)[..., None] * B_bsgn[..., None, :]
    first = update_bsgen[:, :1] + decay_bsgen[:, :1] * state_bgen[:, None]
    states_bsgen = _all_states(decay_bsgen, torch.cat([first, update_bsgen[:, 1:]], dim=1))
    # A view of the last state would keep the whole chunk's states in memory.
    return torch.einsum("bsgen,bsgn->bsge", states_bsgen, C_bsgn), states_bsgen[:, -1].clone()


def _all_states(decay_bsgen: Tensor, update_bsgen: Tensor) -> Tensor:
    """Solve h_i = decay_i h_{i-1} + update_i from h = 0 by recursive doubling (Hillis-Steele scan).

    Hillis, Steele 1986, "Data parallel algorithms". It only multiplies factors in [0, 1], so nothing overflows.
    """
    span, size = 1, decay_bsgen.shape[1]
    while span < size:
        combined = update_bsgen[:, span:] + decay_bsgen[:, span:] * update_bsgen[:, :-span]
        update_bsgen = torch.cat([update_bsgen[:, :span], combined], dim=1)
        decay_bsgen = torch.cat([decay_bsgen[:, :span], decay_bsgen[:, span:] * decay_bsgen[:, :-span]], dim=1)
        span *= 2
    return update_bsgen
