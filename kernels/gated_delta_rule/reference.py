"""Gated delta rule in plain torch: recurrent (the definition) and chunked (equivalent and faster).

Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464). The state S is [dk, dv] per head:

    S <- exp(g_t) S;  u_t = beta_t (v_t - S^T k_t);  S <- S + k_t u_t^T;  o_t = scale * S^T q_t

Suffixes: b batch, h head, t position, n chunk, c and i, j position in a chunk, d key dim, e value dim.
"""

import torch
from torch import Tensor

from kernels.common.chunked_state import pair_decay, to_chunks

CHUNK_SIZE = 64


def recurrent(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bth: Tensor, beta_bth: Tensor, *, scale: float, state_bhde: Tensor
) -> tuple[Tensor, Tensor]:
    """Iterate over the tokens.

    Args:
        q_bthd: queries [b, t, h, dk]. All arguments have one dtype, fp32 or float64.
        k_bthd: keys [b, t, h, dk].
        v_bthe: values [b, t, h, dv].
        g_bth: log decay [b, t, h], at most 0.
        beta_bth: write strength [b, t, h].
        scale: factor on q.
        state_bhde: state before the first token [b, h, dk, dv].

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    outputs = []
    for t in range(q_bthd.shape[1]):
        state_bhde = state_bhde * g_bth[:, t, :, None, None].exp()
        read_bhe = torch.einsum("bhd,bhde->bhe", k_bthd[:, t], state_bhde)
        u_bhe = beta_bth[:, t, :, None] * (v_bthe[:, t] - read_bhe)
        state_bhde = state_bhde + k_bthd[:, t, :, :, None] * u_bhe[:, :, None, :]
        outputs.append(torch.einsum("bhd,bhde->bhe", q_bthd[:, t] * scale, state_bhde))
    return torch.stack(outputs, dim=1), state_bhde


def chunked(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bth: Tensor, beta_bth: Tensor, *, scale: float, state_bhde: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan over chunks of 64 tokens; the work within a chunk is batched over all chunks.

    Let G be the running sum of g within a chunk and S the chunk's initial state. The chunk's u solve the triangular
    system u_i + sum_{j<i} beta_i e^(G_i-G_j) (k_i.k_j) u_j = beta_i v_i - beta_i e^(G_i) S^T k_i (the WY form). No
    exponent is positive.

    Args:
        q_bthd: queries. Shapes and dtypes are those of `recurrent`.
        k_bthd: keys.
        v_bthe: values.
        g_bth: log decay.
        beta_bth: write strength.
        scale: factor on q.
        state_bhde: state before the first token.

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    length = q_bthd.shape[1]
    size = min(CHUNK_SIZE, length)
    q, k, v, g, beta = (to_chunks(x, size) for x in (q_bthd, k_bthd, v_bthe, g_bth[..., None], beta_bth[..., None]))
    total = g.cumsum(dim=-2)
    decay_from_start = total.exp()
    pair_decays = pair_decay(total)
    local_u, w = _solve_chunks(k, v, beta, decay_from_start, pair_decays)
    keys_to_end = (total[..., -1:, :] - total).exp() * k
    state_bhde, states, updates = _scan(local_u, w, keys_to_end, decay_from_start[..., -1:, :], state_bhde)
    q = q * scale
    out_bhnce = (q * decay_from_start) @ states + (q @ k.mT * pair_decays) @ updates
    return out_bhnce.flatten(2, 3)[:, :, :length].transpose(1, 2), state_bhde


def _solve_chunks(
    k: Tensor, v: Tensor, beta: Tensor, decay_from_start: Tensor, pair_decays: Tensor
) -> tuple[Tensor, Tensor]:
    """Solve the chunks' triangular systems, so that u = local_u - w @ S: [b, h, n, c, dv] and [b, h, n, c, dk]."""
    system = (beta * (k @ k.mT) * pair_decays).tril(-1)
    rhs = torch.cat([beta * v, beta * decay_from_start * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True)
    local_u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    return local_u, w


def _scan(
    local_u: Tensor, w: Tensor, keys_to_end: Tensor, decay_from_start: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan the state over the chunks. Return the final state, each chunk's initial state and each chunk's u."""
    states, updates = [], []
    for n in range(local_u.shape[2]):
        u = local_u[:, :, n] - w[:, :, n] @ state
        states.append(state)
        updates.append(u)
        state = decay_from_start[:, :, n] * state + keys_to_end[:, :, n].mT @ u
    return state, torch.stack(states, dim=2), torch.stack(updates, dim=2)
