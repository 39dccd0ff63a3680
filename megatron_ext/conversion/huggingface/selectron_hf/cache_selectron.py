"""Decode cache of a model: recurrent states, last rows of convolutions and token shifts, keys and values.

Batch rows with the same amount of left padding are computed together, with the padding cut off. Padding therefore never
changes the result, for any mixer. Shape suffixes: b batch, t position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class EmptyHistory:
    """Cache of a layer that contains nothing and stores nothing, used at the start of a sequence without decoding."""

    def previous_rows(self, name: str, x_bt: Tensor, count: int) -> Tensor:
        """Return the last rows before x, [b, count, ...]. Rows before the start of the sequence are zeros.

        Args:
            name: name of these rows in the layer.
            x_bt: rows of this call, [b, t, ...].
            count: number of rows to return.
        """
        return x_bt.new_zeros(x_bt.shape[0], count, *x_bt.shape[2:])

    def prefix_rows(self, name: str, x_bt: Tensor, window: int | None = None) -> Tensor:
        """Return all rows from the start of the sequence to the last row of this call, [b, s, ...], s >= t.

        Args:
            name: name of these rows in the layer.
            x_bt: rows of this call, [b, t, ...].
            window: number of rows that a position uses, including its own row. Older rows may be missing. None: all
                rows.
        """
        return x_bt

    def state(self, name: str) -> Tensor | None:
        """Return the recurrent state before the rows of this call, or None if the state is zero."""
        return None

    def store_state(self, name: str, state: Tensor) -> None:
        """Store the recurrent state after the rows of this call."""


class LayerCache(EmptyHistory):
    """Decode cache of one layer.

    Attributes:
        tensors: cached tensors by name, batch first.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def previous_rows(self, name: str, x_bt: Tensor, count: int) -> Tensor:
        """Implement `EmptyHistory.previous_rows`."""
        previous = self.tensors.get(name)
        if previous is None:
            previous = super().previous_rows(name, x_bt, count)
        self._store_last(name, torch.cat([previous, x_bt], 1), count)
        return previous

    def prefix_rows(self, name: str, x_bt: Tensor, window: int | None = None) -> Tensor:
        """Implement `EmptyHistory.prefix_rows`."""
        rows = torch.cat([self.tensors[name], x_bt], 1) if name in self.tensors else x_bt
        self._store_last(name, rows, rows.shape[1] if window is None else window - 1)
        return rows

    def state(self, name: str) -> Tensor | None:
        """Implement `EmptyHistory.state`."""
        return self.tensors.get(name)

    def store_state(self, name: str, state: Tensor) -> None:
        """Implement `EmptyHistory.store_state`."""
        self.tensors[name] = state

    def _store_last(self, name: str, rows: Tensor, count: int) -> None:
        stored = rows[:, max(rows.shape[1] - count, 0) :]
        # A view would keep the storage of all rows and of the layer's other projected features in memory.
        self.tensors[name] = stored.clone() if stored.untyped_storage().nbytes() > stored.nbytes else stored


@dataclass
class RowGroup:
    """Batch rows with the same amount of left padding.

    Attributes:
        padding: number of padding columns before the first token.
        rows: indices of the rows in the batch.
        layers: cache of each layer for these rows.
    """

    padding: int
    rows: list[int]
    layers: Sequence[EmptyHistory] = field(default_factory=list)


def group_rows(padding: Sequence[int]) -> list[RowGroup]:
    """Group batch rows by their left padding. The groups have no layer caches yet.

    Args:
        padding: number of padding columns before the first token of each row.
    """
    groups = {columns: RowGroup(columns, []) for columns in padding}
    for row, columns in enumerate(padding):
        groups[columns].rows.append(row)
    return list(groups.values())


def left_padding(mask_bs: Tensor) -> tuple[list[int], bool]:
    """Return the left padding of each row, and whether any row has padding after its last token.

    Args:
        mask_bs: 1 for tokens, 0 for padding, [b, cached columns + columns of this call].

    Raises:
        ValueError: a row has no token, or has padding between tokens.
    """
    is_token = mask_bs != 0
    padding = (is_token.cumsum(1) == 0).sum(1)
    right_padding = (is_token.flip(1).cumsum(1) == 0).sum(1)
    between = is_token.shape[1] - is_token.sum(1) - padding - right_padding
    counts: list[list[int]] = torch.stack([padding, right_padding, between]).tolist()  # one transfer from the device
    if max(counts[0]) == is_token.shape[1]:
        raise ValueError("attention_mask has a row without any token: remove the row")
    if any(counts[2]):
        raise ValueError("attention_mask has padding between the tokens of a row: pad on the left")
    return counts[0], any(counts[1])


class SelectronCache(Cache):
    """Decode cache of a model. The first call of the model with `use_cache` creates it.

    Args:
        padding: number of padding columns before the first token of each row.
        num_layers: number of layers of the model.

    Attributes:
        num_columns: number of cached columns, padding included.
        groups: rows grouped by their padding.
    """

    def __init__(self, padding: Sequence[int], num_layers: int) -> None:
        super().__init__(layers=[])
        self.num_columns = 0
        self.padding = list(padding)
        self.num_layers = num_layers
        self.groups = group_rows(padding)
        self.reset()

    def __len__(self) -> int:
        return self.num_layers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of cached columns, which is equal for all layers."""
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: the cache has no maximum length."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the length of the attention mask and the index of its first column."""
        return self.num_columns + query_length, 0

    def reset(self) -> None:
        """Remove all cached tensors."""
        self.num_columns = 0
        for group in self.groups:
            group.layers = [LayerCache() for _ in range(self.num_layers)]

    def select_rows(self, index: Sequence[int]) -> None:
        """Replace the batch by some of its rows.

        Args:
            index: indices of the new batch's rows in the current batch. A row may occur more than once.
        """
        location = {row: (group, i) for group in self.groups for i, row in enumerate(group.rows)}
        self.padding = [self.padding[row] for row in index]
        selected = group_rows(self.padding)
        for group in selected:
            source, _ = location[index[group.rows[0]]]
            rows = [location[index[row]][1] for row in group.rows]
            group.layers = [_select_layer_rows(layer, rows) for layer in source.layers if isinstance(layer, LayerCache)]
        self.groups = selected

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Implement `Cache.reorder_cache`, which beam search calls."""
        self.select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Implement `Cache.batch_select_indices`."""
        self.select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Implement `Cache.batch_repeat_interleave`."""
        self.select_rows([row for row in range(len(self.padding)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: tokens cannot be removed from a recurrent state."""
        raise ValueError("a Selectron cache cannot be cropped: tokens cannot be removed from a recurrent state")

    @property
    def batch_size(self) -> int:
        """Number of rows of the batch."""
        return len(self.padding)

    @property
    def is_compileable(self) -> bool:
        """False, because the cached tensors grow."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True once tokens have been cached."""
        return self.num_columns > 0

    @property
    def is_croppable(self) -> bool:
        """False, because `crop` is not possible."""
        return False


def _select_layer_rows(layer: LayerCache, rows: Sequence[int]) -> LayerCache:
    """Return the cache of a layer for some of its rows."""
    selected = LayerCache()
    selected.tensors = {name: x[torch.tensor(rows, device=x.device)] for name, x in layer.tensors.items()}
    return selected
