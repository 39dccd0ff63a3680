"""Mixers with a key-value cache: softmax attention, Top-1 Element, Top-1 Chunk, MoBA, Native Sparse Attention.

Shape suffixes: b batch, t position, s key, h query head, g key and value head, d head width.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from .attention_ops_selectron import (
    alibi_slopes,
    native_sparse_attention,
    softmax_attention,
    top1_chunk,
    top1_element,
)
from .cache_selectron import EmptyHistory
from .mixer_selectron import Mixer, Positions, split_head_groups

NUM_BRANCHES = 3


class KeyValueMixer(Mixer):
    """Base class of mixers with keys and values.

    The rows of the input projection are, for each query group, [queries | key | value | gates].
    """

    window: int | None = None
    projects_keys = True
    num_gates = 0
    """Number of gates per query head."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.configure()
        queries = self.num_heads // self.num_groups
        self.widths = [queries * self.head_dim, self.head_dim * self.projects_keys, self.head_dim]
        self.widths.append(self.num_gates * queries)
        self.in_proj = self.linear(self.hidden_size, self.num_groups * sum(self.widths))
        self.out_proj = self.linear(self.num_heads * self.head_dim, self.hidden_size)
        self.scale = self.head_dim**-0.5

    def configure(self) -> None:
        """Set the class-specific attributes from the settings, before the parameters are created."""

    def attend(self, q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, gates_bthx: Tensor) -> Tensor:
        """Return the attention output [b, t, h, d].

        Args:
            q_bthd: queries [b, t, h, d].
            k_bsgd: keys [b, s, g, d]; the last t of them belong to the queries.
            v_bsgd: values [b, s, g, d].
            gates_bthx: gate logits [b, t, h, `num_gates`].
        """
        raise NotImplementedError

    def fixed_keys(self, v_bsgd: Tensor, first: int) -> Tensor:
        """Return the keys of a mixer without key projection, [b, s, g, d].

        Args:
            v_bsgd: values, which give the number of keys, the device and the dtype.
            first: position of the first key.
        """
        raise NotImplementedError

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        q, k, v, gates = split_head_groups(self.in_proj(x_bth), self.num_groups, self.widths)
        q_bthd = q.flatten(2).unflatten(-1, (self.num_heads, self.head_dim))
        if self.projects_keys and self.settings.position_encoding == "rope":
            q_bthd, k = positions.rotate(q_bthd), positions.rotate(k)
        v_bsgd = history.prefix_rows("values", v, self.window)
        if self.projects_keys:
            k_bsgd = history.prefix_rows("keys", k, self.window)
        else:
            k_bsgd = self.fixed_keys(v_bsgd, positions.first + positions.count - v_bsgd.shape[1])
        gates_bthx = gates.flatten(2).unflatten(-1, (self.num_heads, self.num_gates))
        projected: Tensor = self.out_proj(self.attend(q_bthd, k_bsgd, v_bsgd, gates_bthx).flatten(2))
        return projected


class Attention(KeyValueMixer):
    """Softmax attention with the options of the ablation study: window, temperature, ALiBi and random keys."""

    def configure(self) -> None:
        """Implement `KeyValueMixer.configure`."""
        self.window = self.settings.window
        self.projects_keys = not self.settings.random_keys
        self._fixed_keys: Tensor | None = None

    def attend(self, q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, gates_bthx: Tensor) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        alibi = self.settings.position_encoding == "alibi"
        slopes = alibi_slopes(self.num_heads, q_bthd.device) if alibi else None
        scale = self.scale / self.settings.temperature
        return softmax_attention(q_bthd, k_bsgd, v_bsgd, scale=scale, window=self.window, slopes_h=slopes)

    def fixed_keys(self, v_bsgd: Tensor, first: int) -> Tensor:
        """Return random keys [b, s, g, d] that depend only on (seed, layer, group, position)."""
        end = first + v_bsgd.shape[1]
        if self._fixed_keys is None or len(self._fixed_keys) < end or self._fixed_keys.device != v_bsgd.device:
            # Rounded up to a power of two, so that decoding token by token rarely draws new keys.
            count, seed = 1 << (end - 1).bit_length(), self.settings.random_keys_seed
            stream_keys = [(seed, self.layer_number, group) for group in range(self.num_groups)]
            # A tensor created in inference mode could not be used in training later.
            with torch.inference_mode(False):
                vectors = [_random_vectors(count, self.head_dim, stream_key) for stream_key in stream_keys]
                self._fixed_keys = torch.stack(vectors, 1).to(v_bsgd.device)
        return self._fixed_keys[first:end].to(v_bsgd.dtype).expand(v_bsgd.shape[0], -1, -1, -1)


def _random_vectors(count: int, width: int, stream_key: tuple[int, ...]) -> Tensor:
    """Return standard normal vectors, fp32 [count, width] on the CPU. Vector i depends only on `stream_key` and i."""
    digest = hashlib.blake2b(repr(stream_key).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    # torch draws numbers in blocks of 16, and draws an incomplete last block differently.
    return torch.randn(-(-count // 16) * 16, width, generator=generator, device="cpu", dtype=torch.float32)[:count]


class Top1Element(KeyValueMixer):
    """Top-1 Element attention: each query takes the value whose key scores highest."""

    def attend(self, q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, gates_bthx: Tensor) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        return top1_element(q_bthd, k_bsgd, v_bsgd, scale=self.scale, estimator=self.settings.estimator)


class Top1Chunk(KeyValueMixer):
    """Top-1 Chunk attention: each query attends to its own chunk and the best-scoring earlier ones."""

    def configure(self) -> None:
        """Implement `KeyValueMixer.configure`."""
        names = ("chunk_size", "top_k", "score", "local")
        self.selection: dict[str, Any] = {name: getattr(self.settings, name) for name in names}

    def attend(self, q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, gates_bthx: Tensor) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        return top1_chunk(q_bthd, k_bsgd, v_bsgd, scale=self.scale, **self.selection)


class MoBA(Top1Chunk):
    """Mixture of block attention: blocks are selected by their mean key, and the own block is always included."""

    def configure(self) -> None:
        """Implement `KeyValueMixer.configure`. MoBA's `top_k` includes the query's own block."""
        chunk_size, top_k = self.settings.block_size, self.settings.top_k - 1
        self.selection = {"chunk_size": chunk_size, "top_k": top_k, "score": "approx", "local": True}


class NSA(KeyValueMixer):
    """Native Sparse Attention. The rows of a group end with three gates for each of its query heads."""

    num_gates = NUM_BRANCHES

    def attend(self, q_bthd: Tensor, k_bsgd: Tensor, v_bsgd: Tensor, gates_bthx: Tensor) -> Tensor:
        """Implement `KeyValueMixer.attend`."""
        settings = self.settings
        return native_sparse_attention(
            q_bthd,
            k_bsgd,
            v_bsgd,
            gates_bthx.float().sigmoid(),
            scale=self.scale,
            block_size=settings.block_size,
            num_selected=settings.num_selected,
            window=settings.window,
        )
