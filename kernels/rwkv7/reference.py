"""State update of RWKV-7 in plain torch: recurrent (the definition) and chunked (equivalent and faster).

Peng et al. 2025, "RWKV-7 Goose" (arXiv 2503.14456), the generalised delta rule S_t = S_{t-1} (diag(w_t) + z_t^T b_t)
+ v_t^T k_t of row vectors. Here the state S is its transpose, [dk, dv] per head, a is its z, and exp(g) is its w:

    u_t = S^T a_t;  S <- diag(exp(g_t)) S + b_t u_t^T + k_t v_t^T;  o_t = scale * S^T r_t

Suffixes: b batch, h head, t position, n chunk, c and i, j position in a chunk, d key dim, e value dim.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.common.chunked_state import VECTOR_DECAY_CHUNK_SIZE, pair_decay, to_chunks


def recurrent(
    r_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    g_bthd: Tensor,
    a_bthd: Tensor,
    b_bthd: Tensor,
    *,
    scale: float,
    state_bhde: Tensor,
) -> tuple[Tensor, Tensor]:
    """Iterate over the tokens.

    Args:
        r_bthd: receptances [b, t, h, dk]. All arguments have one dtype, fp32 or float64.
        k_bthd: keys [b, t, h, dk].
        v_bthe: values [b, t, h, dv].
        g_bthd: log decay [b, t, h, dk], at most 0.
        a_bthd: direction in which the old state is read [b, t, h, dk].
        b_bthd: direction in which the result of that read is written [b, t, h, dk].
        scale: factor on r.
        state_bhde: state before the first token [b, h, dk, dv].

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    outputs = []
    for t in range(r_bthd.shape[1]):
        u_bhe = torch.einsum("bhd,bhde->bhe", a_bthd[:, t], state_bhde)
        update = b_bthd[:, t, :, :, None] * u_bhe[:, :, None, :]
        key_value = k_bthd[:, t, :, :, None] * v_bthe[:, t, :, None, :]
        state_bhde = state_bhde * g_bthd[:, t, :, :, None].exp() + update + key_value
        outputs.append(torch.einsum("bhd,bhde->bhe", r_bthd[:, t] * scale, state_bhde))
    return torch.stack(outputs, dim=1), state_bhde


def chunked(
    r_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    g_bthd: Tensor,
    a_bthd: Tensor,
    b_bthd: Tensor,
    *,
    scale: float,
    state_bhde: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scan over chunks of 16 tokens; the work within a chunk is batched over all chunks.

    Let G be the running sum of g within a chunk, S the chunk's initial state and <x_i, y_j> = x_i . (e^(G_i-G_j) y_j).
    The u of the chunk solve the triangular system (the WY form)

        u_i - sum_{j<i} <a'_i, b_j> u_j = S^T (e^(G_{i-1}) a_i) + sum_{j<i} <a'_i, k_j> v_j,

    where <a'_i, y_j> decays to G_{i-1} instead of G_i, because u_i is read before the decay of token i. The output is
    o_i = scale * (S^T (e^(G_i) r_i) + sum_{j<=i} <r_i, b_j> u_j + <r_i, k_j> v_j). No exponent is positive.

    Args:
        r_bthd: receptances. Shapes and dtypes are those of `recurrent`.
        k_bthd: keys.
        v_bthe: values.
        g_bthd: log decay.
        a_bthd: direction of the read.
        b_bthd: direction of the write.
        scale: factor on r.
        state_bhde: state before the first token.

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    length = r_bthd.shape[1]
    size = min(VECTOR_DECAY_CHUNK_SIZE, length)
    r, k, v, g, a, b = (to_chunks(x, size) for x in (r_bthd * scale, k_bthd, v_bthe, g_bthd, a_bthd, b_bthd))
    total = g.cumsum(dim=-2)
    (ab, ak), (rb, rk) = _products(a, r, b, k, total)
    local_u, w = _solve_chunks(ab, ak @ v, _shift_down(total).exp() * a)
    decay_to_end = (total[..., -1:, :] - total).exp()
    key_value = (decay_to_end * k).mT @ v
    state_bhde, states, updates = _scan(
        local_u, w, decay_to_end * b, key_value, total[..., -1:, :].exp().mT, state_bhde
    )
    out_bhnce = (r * total.exp()) @ states + rb @ updates + rk @ v
    return out_bhnce.flatten(2, 3)[:, :, :length].transpose(1, 2), state_bhde


def _shift_down(x_c1: Tensor) -> Tensor:
    """Shift a chunk's rows, [..., c, any], down by one; the first row becomes zero."""
    return pad(x_c1[..., :-1, :], (0, 0, 1, 0))


def _products(a: Tensor, r: Tensor, b: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return ((<a'_i, b_j>, <a'_i, k_j>), (<r_i, b_j>, <r_i, k_j>)): [2, 2, b, h, n, i, j], zero for non-causal j."""
    # a is shifted up by one row, so that the rows of a and r decay to G_i. The products of a are shifted back down.
    left = torch.stack([pad(a[..., 1:, :], (0, 0, 0, 1)), r])
    decayed = left.mT[..., None] * pair_decay(total.mT[..., None])
    products_a, products_r = torch.einsum("xbhndij,ybhnjd->xybhnij", decayed, torch.stack([b, k]))
    return torch.stack([_shift_down(products_a), products_r])


def _solve_chunks(ab: Tensor, local_u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Solve the chunks' triangular systems, so that u = local_u + w @ S: [b, h, n, c, dv] and [b, h, n, c, dk]."""
    rhs = torch.cat([local_u, w], dim=-1)
    solved = torch.linalg.solve_triangular(-ab, rhs, upper=False, unitriangular=True)
    local_u, w = solved.split([local_u.shape[-1], w.shape[-1]], dim=-1)
    return local_u, w


def _scan(
    local_u: Tensor, w: Tensor, b_to_end: Tensor, key_value: Tensor, decay_bhnd1: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan the state over the chunks. Return the final state, each chunk's initial state and each chunk's u."""
    states, updates = [], []
    for n in range(local_u.shape[2]):
        u = local_u[:, :, n] + w[:, :, n] @ state
        states.append(state)
        updates.append(u)
        state = decay_bhnd1[:, :, n] * state + b_to_end[:, :, n].mT @ u + key_value[:, :, n]
    return state, torch.stack(states, dim=2), torch.stack(updates, dim=2)
