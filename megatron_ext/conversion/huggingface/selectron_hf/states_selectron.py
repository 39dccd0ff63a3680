"""Chunked scans over recurrent states in plain torch, computed in fp32.

The work inside a chunk is batched over all chunks. A single token, as in generation, takes one recurrent step.

Shape suffixes: b batch, h head, t position, n chunk, c, i and j position in a chunk, d key dim, e value dim, f d or 1.
In `selective_scan`, c is a channel and n a state dim. Every exponent of a decay is at most 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from .mixer_selectron import full_precision

CHUNK_SIZE = 64
VECTOR_DECAY_CHUNK_SIZE = 16
"""Chunk size for decays per key feature, which need one value per pair of positions and feature."""


def _to_chunks(x_bthd: Tensor, size: int) -> Tensor:
    """Reshape [b, t, h, d] to [b, h, n, size, d], padded with zeros, which neither decay nor write."""
    num_missing = -x_bthd.shape[1] % size
    return pad(x_bthd.float(), (0, 0, 0, 0, 0, num_missing)).transpose(1, 2).unflatten(2, (-1, size))


def _from_chunks(x_bhnce: Tensor, length: int) -> Tensor:
    return x_bhnce.flatten(2, 3)[:, :, :length].transpose(1, 2)


def _pair_decay(total_c1: Tensor) -> Tensor:
    """Return e^(G_i - G_j) for j <= i and zero otherwise, from cumulative log decays [..., c, 1] to [..., i, j]."""
    size = total_c1.shape[-2]
    above = torch.ones(size, size, dtype=torch.bool, device=total_c1.device).triu(1)
    # Masked before exp: above the diagonal the exponent is positive, and inf * 0 in the backward pass would be NaN.
    return (total_c1 - total_c1.mT).masked_fill(above, -torch.inf).exp()


def _first_state(state: Tensor | None, k_bthd: Tensor, v_bthe: Tensor) -> Tensor:
    b, _, h, d = k_bthd.shape
    return state if state is not None else torch.zeros(b, h, d, v_bthe.shape[-1], device=k_bthd.device)


def _squeeze_token(*x_b1hd: Tensor) -> Iterator[Tensor]:
    return (x[:, 0].float() for x in x_b1hd)


def _outer(k_bhd: Tensor, v_bhe: Tensor) -> Tensor:
    """Return the update that a token writes at its key, [b, h, d, e]."""
    return k_bhd[..., None] * v_bhe[..., None, :]


def _read(q_bhd: Tensor, state_bhde: Tensor) -> Tensor:
    """Return the product of a token's query with the state, [b, h, e]."""
    return (q_bhd[..., None, :] @ state_bhde).squeeze(-2)


@full_precision
def linear_attention(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bthf: Tensor, state_bhde: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute S <- diag(exp(g_t)) S + k_t v_t^T;  o_t = scale * S^T q_t (Yang et al. 2023, arXiv 2312.06635).

    Args:
        q_bthd: queries [b, t, h, d], any floating dtype.
        k_bthd: keys [b, t, h, d].
        v_bthe: values [b, t, h, e].
        g_bthf: log decay, at most 0, one value per token (f = 1) or per key feature (f = d).
        state_bhde: state before the first token; None: zeros.
        scale: factor on q.

    Returns:
        o [b, t, h, e] and the state after the last token [b, h, d, e], fp32.
    """
    length, state = q_bthd.shape[1], _first_state(state_bhde, k_bthd, v_bthe)
    if length == 1:
        q, k, v, g = _squeeze_token(q_bthd, k_bthd, v_bthe, g_bthf)
        state = g[..., None].exp() * state + _outer(k, v)
        return _read(q * scale, state)[:, None], state
    size = min(CHUNK_SIZE if g_bthf.shape[-1] == 1 else VECTOR_DECAY_CHUNK_SIZE, length)
    q, k, v, g = (_to_chunks(x, size) for x in (q_bthd, k_bthd, v_bthe, g_bthf))
    q, total = q * scale, g.cumsum(-2)
    if g.shape[-1] == 1:
        weights = q @ k.mT * _pair_decay(total)
    else:
        weights = torch.einsum("bhnid,bhnjd,bhndij->bhnij", q, k, _pair_decay(total.mT[..., None]))
    last = total[..., -1:, :]
    updates, decay = ((last - total).exp() * k).mT @ v, last.exp().mT
    states = []
    for n in range(updates.shape[2]):
        states.append(state)
        state = decay[:, :, n] * state + updates[:, :, n]
    return _from_chunks((q * total.exp()) @ torch.stack(states, 2) + weights @ v, length), state


@full_precision
def rwkv6(
    r_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bthd: Tensor, u_hd: Tensor, state_bhde: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute o_t = (S + diag(u) k_t v_t^T)^T r_t;  S <- diag(exp(g_t)) S + k_t v_t^T (arXiv 2404.05892).

    RWKV-6 reads the state before token t is written, and `linear_attention` reads it afterwards. Query t of
    `linear_attention` is therefore r_{t+1}.

    Args:
        r_bthd: receptances [b, t, h, d], any floating dtype.
        k_bthd: keys [b, t, h, d].
        v_bthe: values [b, t, h, e].
        g_bthd: log decay per key feature, at most 0.
        u_hd: bonus of the current token.
        state_bhde: state before the first token; None: zeros.

    Returns:
        o [b, t, h, e] and the state after the last token [b, h, d, e], fp32.
    """
    r, k, v, u = (x.float() for x in (r_bthd, k_bthd, v_bthe, u_hd))
    state = _first_state(state_bhde, k, v)
    first = _read(r[:, 0], state)[:, None]
    current = (r * u * k).sum(-1, keepdim=True) * v
    if r.shape[1] == 1:
        return first + current, g_bthd[:, 0, :, :, None].float().exp() * state + _outer(k[:, 0], v[:, 0])
    next_r = torch.cat([r[:, 1:], torch.zeros_like(r[:, :1])], 1)
    shifted, last = linear_attention(next_r, k, v, g_bthd, state, 1.0)
    return torch.cat([first, shifted[:, :-1]], 1) + current, last


@full_precision
def delta_rule(
    q_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bth: Tensor, beta_bth: Tensor, state_bhde: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute S <- exp(g_t) S;  S <- S + beta_t k_t (v_t - S^T k_t)^T;  o_t = S^T q_t / sqrt(d) (arXiv 2412.06464).

    The updates of a chunk are the solution of a triangular system (WY representation).

    Args:
        q_bthd: queries [b, t, h, d], any floating dtype.
        k_bthd: keys [b, t, h, d].
        v_bthe: values [b, t, h, e].
        g_bth: log decay, at most 0.
        beta_bth: strength of the update.
        state_bhde: state before the first token; None: zeros.

    Returns:
        o [b, t, h, e] and the state after the last token [b, h, d, e], fp32.
    """
    length, scale = q_bthd.shape[1], q_bthd.shape[-1] ** -0.5
    size, state = min(CHUNK_SIZE, length), _first_state(state_bhde, k_bthd, v_bthe)
    if length == 1:
        q, k, v, g, beta = _squeeze_token(q_bthd, k_bthd, v_bthe, g_bth[..., None], beta_bth[..., None])
        state = g[..., None].exp() * state
        state = state + _outer(k, beta * (v - _read(k, state)))
        return _read(q * scale, state)[:, None], state
    q, k, v, g, beta = (_to_chunks(x, size) for x in (q_bthd, k_bthd, v_bthe, g_bth[..., None], beta_bth[..., None]))
    q, total = q * scale, g.cumsum(-2)
    decay, decay_from_start, last = _pair_decay(total), total.exp(), total[..., -1:, :]
    own, reads = _solve_unit_lower(beta * (k @ k.mT) * decay, beta * v, beta * decay_from_start * k)
    to_end = ((last - total).exp() * k).mT
    states, updates = [], []
    for n in range(own.shape[2]):
        states.append(state)
        updates.append(own[:, :, n] - reads[:, :, n] @ state)
        state = last[:, :, n].exp() * state + to_end[:, :, n] @ updates[-1]
    out = (q * decay_from_start) @ torch.stack(states, 2) + (q @ k.mT * decay) @ torch.stack(updates, 2)
    return _from_chunks(out, length), state


@full_precision
def rwkv7(
    r_bthd: Tensor,
    k_bthd: Tensor,
    v_bthe: Tensor,
    w_bthd: Tensor,
    a_bthd: Tensor,
    b_bthd: Tensor,
    state_bhde: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute S <- (diag(exp(w_t)) + b_t a_t^T) S + k_t v_t^T;  o_t = S^T r_t (Peng et al. 2025, arXiv 2503.14456).

    The vectors u_t = S^T a_t of a chunk are the solution of a triangular system (WY representation).

    Args:
        r_bthd: receptances [b, t, h, d], any floating dtype.
        k_bthd: keys [b, t, h, d].
        v_bthe: values [b, t, h, e].
        w_bthd: log decay per key feature, at most 0.
        a_bthd: key that reads from the old state, [b, t, h, d].
        b_bthd: key at which the result of this read is added, [b, t, h, d].
        state_bhde: state before the first token; None: zeros.

    Returns:
        o [b, t, h, e] and the state after the last token [b, h, d, e], fp32.
    """
    length, state = r_bthd.shape[1], _first_state(state_bhde, k_bthd, v_bthe)
    if length == 1:
        r, k, v, w, a, b = _squeeze_token(r_bthd, k_bthd, v_bthe, w_bthd, a_bthd, b_bthd)
        state = w[..., None].exp() * state + _outer(b, _read(a, state)) + _outer(k, v)
        return _read(r, state)[:, None], state
    size = min(VECTOR_DECAY_CHUNK_SIZE, length)
    r, k, v, w, a, b = (_to_chunks(x, size) for x in (r_bthd, k_bthd, v_bthe, w_bthd, a_bthd, b_bthd))
    total = w.cumsum(-2)
    last, decay = total[..., -1:, :], _pair_decay(total.mT[..., None])
    # a reads the state before its own token's decay. a is shifted up by one row, so that it uses the decay that r
    # uses, and the products are shifted back down.
    next_a = pad(a[..., 1:, :], (0, 0, 0, 1))
    ab, ak = (_shift_down(torch.einsum("bhnid,bhnjd,bhndij->bhnij", next_a, x, decay)) for x in (b, k))
    rb, rk = (torch.einsum("bhnid,bhnjd,bhndij->bhnij", r, x, decay) for x in (b, k))
    own, reads = _solve_unit_lower(-ab, ak @ v, _shift_down(total).exp() * a)
    decay_to_end = (last - total).exp()
    written, to_end, chunk_decay = (decay_to_end * k).mT @ v, (decay_to_end * b).mT, last.exp().mT
    states, updates = [], []
    for n in range(own.shape[2]):
        states.append(state)
        updates.append(own[:, :, n] + reads[:, :, n] @ state)
        state = chunk_decay[:, :, n] * state + to_end[:, :, n] @ updates[-1] + written[:, :, n]
    out = (r * total.exp()) @ torch.stack(states, 2) + rb @ torch.stack(updates, 2) + rk @ v
    return _from_chunks(out, length), state


def _shift_down(x_c1: Tensor) -> Tensor:
    """Shift the rows of a chunk down by one, [..., c, any]. The first row becomes zero."""
    return pad(x_c1[..., :-1, :], (0, 0, 1, 0))


def _solve_unit_lower(matrix: Tensor, own: Tensor, reads: Tensor) -> tuple[Tensor, Tensor]:
    """Solve (1 + strictly lower triangle of `matrix`) x = y for the right-hand sides `own` and `reads`."""
    right_sides = torch.cat([own, reads], -1)
    solution = torch.linalg.solve_triangular(matrix.tril(-1), right_sides, upper=False, unitriangular=True)
    own, reads = solution.split([own.shape[-1], reads.shape[-1]], -1)
    return own, reads


@full_precision
def selective_scan(
    x_btc: Tensor, dt_btc: Tensor, A_cn: Tensor, B_btn: Tensor, C_btn: Tensor, state_bcn: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute h <- exp(dt_t A) h + dt_t x_t B_t;  y_t = C_t . h for each channel (Gu, Dao 2023, arXiv 2312.00752).

    Args:
        x_btc: channels [b, t, c], any floating dtype.
        dt_btc: step sizes, not negative.
        A_cn: rates, at most 0.
        B_btn: input vectors [b, t, n].
        C_btn: output vectors [b, t, n].
        state_bcn: state before the first token; None: zeros.

    Returns:
        y [b, t, c] and the state after the last token [b, c, n], fp32.
    """
    x, dt, A, B, C = (y.float() for y in (x_btc, dt_btc, A_cn, B_btn, C_btn))
    state = state_bcn if state_bcn is not None else torch.zeros(x.shape[0], *A.shape, device=x.device)
    outputs = []
    for chunk in zip(*(y.split(VECTOR_DECAY_CHUNK_SIZE, 1) for y in (x, dt, B, C)), strict=True):
        # The backward pass recomputes a chunk's states. Stored, they would take n values per channel and token.
        y, state = checkpoint(_scan_chunk, *chunk, A, state, use_reentrant=False, preserve_rng_state=False)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def _scan_chunk(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = (dt[..., None] * A).exp()
    states = (dt * x)[..., None] * B[:, :, None]
    states = torch.cat([states[:, :1] + decay[:, :1] * state[:, None], states[:, 1:]], 1)
    span = 1
    while span < decay.shape[1]:  # Hillis, Steele 1986: each position covers `span` positions
        joined = states[:, span:] + decay[:, span:] * states[:, :-span]
        states = torch.cat([states[:, :span], joined], 1)
        decay = torch.cat([decay[:, :span], decay[:, span:] * decay[:, :-span]], 1)
        span *= 2
    # A view of the last state would keep all states of the chunk in memory.
    return torch.einsum("btcn,btn->btc", states, C), states[:, -1].clone()
