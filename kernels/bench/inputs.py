"""Random inputs with a given distribution of the queries over chunks.

"even": standard normal q and k, so that choices are spread over all earlier chunks. "same": every query of a head
chooses chunk 0, as with an attention sink. "zipf": a query chooses chunk c with a probability near 1 / (c + 1).
"""

import torch
from torch import Tensor

from kernels.bench.cases import ChoiceDistribution, Shape

DTYPE = torch.bfloat16


def make_inputs(
    shape: Shape, choices: ChoiceDistribution, chunk_size: int, seed: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q [b, t, hq, d], k and v [b, t, hkv, d] in bf16."""
    generator = torch.Generator(device).manual_seed(seed)
    size_q = (shape.batch, shape.length, shape.heads, shape.head_dim)
    size_k = (shape.batch, shape.length, shape.groups, shape.head_dim)
    q, k, v = (torch.randn(size, generator=generator, device=device) for size in (size_q, size_k, size_k))
    if choices == "same":
        _prefer_first_chunk(q, k, chunk_size, generator)
    elif choices == "zipf":
        _prefer_by_zipf(q, k, chunk_size, generator)
    return q.to(DTYPE), k.to(DTYPE), v.to(DTYPE)


def _direction_norm(head_dim: int) -> float:
    """Return the norm of the vector added to q and to k.

    The vector raises q.k by 8 sqrt(d), while 100,000 random q.k stay below 4.5 sqrt(d).
    """
    return (8 * head_dim**0.5) ** 0.5


def _draw_directions(count: int, k_bshd: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a unit vector for each of `count` chunks and each key head: [count, hkv, d]."""
    size = (count, *k_bshd.shape[2:])
    return torch.nn.functional.normalize(torch.randn(size, generator=generator, device=k_bshd.device), dim=-1)


def _prefer_first_chunk(q_bthd: Tensor, k_bshd: Tensor, chunk_size: int, generator: torch.Generator) -> None:
    """Add a common vector to all queries and to the keys of chunk 0; all other components are orthogonal to it."""
    u_gd = _draw_directions(1, k_bshd, generator)[0]
    u_hd = u_gd.repeat_interleave(q_bthd.shape[2] // k_bshd.shape[2], dim=0)
    for x, u in ((q_bthd, u_hd), (k_bshd, u_gd)):
        x -= (x * u).sum(-1, keepdim=True) * u
    q_bthd += _direction_norm(q_bthd.shape[3]) * u_hd
    k_bshd[:, :chunk_size] += _direction_norm(q_bthd.shape[3]) * u_gd


def _prefer_by_zipf(q_bthd: Tensor, k_bshd: Tensor, chunk_size: int, generator: torch.Generator) -> None:
    """Add a separate vector to the keys of each chunk, and the vector of a randomly drawn earlier chunk to a query."""
    batch, length, heads, head_dim = q_bthd.shape
    chunk_t = torch.arange(length, device=q_bthd.device) // chunk_size
    u_ngd = _draw_directions(int(chunk_t[-1]) + 1, k_bshd, generator)
    k_bshd += _direction_norm(head_dim) * u_ngd[chunk_t]
    # Inverse of the cumulative sum of 1, 1/2, 1/3, ... up to the last earlier chunk; chunk 0 has none and takes itself.
    cumulative_n = (1 / torch.arange(1, len(u_ngd) + 1, device=q_bthd.device)).cumsum(0)
    total_t = cumulative_n[(chunk_t - 1).clamp(min=0)]
    drawn_bht = torch.rand(batch, heads, length, generator=generator, device=q_bthd.device) * total_t
    target_bht = torch.searchsorted(cumulative_n, drawn_bht).clamp(max=(chunk_t - 1).clamp(min=0))
    group_h = torch.arange(heads, device=q_bthd.device) // (heads // k_bshd.shape[2])
    q_bthd += _direction_norm(head_dim) * u_ngd[target_bht.transpose(1, 2), group_h]
