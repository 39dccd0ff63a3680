"""Gated linear attention in plain torch: recurrent (the definition) and chunked (equivalent and faster).

Yang, Wang, Shen, Panda, Kim 2023, "Gated Linear Attention Transformers" (arXiv 2312.06635). The state S is [dk, dv] per
head. The log decay g is one number per token, or one per token and key feature:

    S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = scale * S^T q_t

Suffixes: b batch, h head, t position, n chunk, c and i, j position in a chunk, d key dim, e value dim, f d or 1.
"""

import torch
from torch import Tensor

from kernels.common.chunked_state import VECTOR_DECAY_CHUNK_SIZE, pair_decay, to_chunks

CHUNK_SIZE = 64


def recurrent(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bthf: Tensor, *, scale: float, state_bhde: Tensor
) -> tuple[Tensor, Tensor]:
    """Iterate over the tokens.

    Args:
        q_bthd: queries [b, t, h, dk]. All arguments have one dtype, fp32 or float64.
        k_bthd: keys [b, t, h, dk].
        v_bthe: values [b, t, h, dv].
        g_bthf: log decay [b, t, h, dk or 1], at most 0.
        scale: factor on q.
        state_bhde: state before the first token [b, h, dk, dv].

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    outputs = []
    for t in range(q_bthd.shape[1]):
        written = k_bthd[:, t, :, :, None] * v_bthe[:, t, :, None, :]
        state_bhde = state_bhde * g_bthf[:, t, :, :, None].exp() + written
        outputs.append(torch.einsum("bhd,bhde->bhe", q_bthd[:, t] * scale, state_bhde))
    return torch.stack(outputs, dim=1), state_bhde


def chunked(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bthf: Tensor, *, scale: float, state_bhde: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan over chunks; the work within a chunk is batched over all chunks.

    Let G be the running sum of g within a chunk and S the chunk's initial state. Then
    o_i = scale * (S^T (e^(G_i) q_i) + sum_{j<=i} (q_i . (e^(G_i-G_j) k_j)) v_j). No exponent is positive.

    Args:
        q_bthd: queries. Shapes and dtypes are those of `recurrent`.
        k_bthd: keys.
        v_bthe: values.
        g_bthf: log decay.
        scale: factor on q.
        state_bhde: state before the first token.

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    length = q_bthd.shape[1]
    size = min(CHUNK_SIZE if g_bthf.shape[-1] == 1 else VECTOR_DECAY_CHUNK_SIZE, length)
    q, k, v, g = (to_chunks(x, size) for x in (q_bthd * scale, k_bthd, v_bthe, g_bthf))
    total = g.cumsum(dim=-2)
    if total.shape[-1] == 1:
        weights = q @ k.mT * pair_decay(total)
    else:
        weights = torch.einsum("bhnid,bhnjd,bhndij->bhnij", q, k, pair_decay(total.mT[..., None]))
    last = total[..., -1:, :]
    written = ((last - total).exp() * k).mT @ v
    state_bhde, states = _scan(written, last.exp().mT, state_bhde)
    out_bhnce = (q * total.exp()) @ states + weights @ v
    return out_bhnce.flatten(2, 3)[:, :, :length].transpose(1, 2), state_bhde


def _scan(written_bhnde: Tensor, decay_bhnf1: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan the state over the chunks. Return the final state and each chunk's initial state."""
    states = []
    for n in range(written_bhnde.shape[2]):
        states.append(state)
        state = decay_bhnf1[:, :, n] * state + written_bhnde[:, :, n]
    return state, torch.stack(states, dim=2)
