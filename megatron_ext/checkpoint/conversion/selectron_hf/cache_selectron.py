"""What a model remembers of the sequences it has seen: states, last rows, keys and values.

Rows of a batch that begin with equally much padding go through the model together, without it: so padding changes
nothing, whatever the mixer. Suffixes: b batch, t position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class Beginning:
    """What lies before the rows that a layer is given: nothing."""

    def rows_before(self, name: str, x_bt: Tensor, count: int) -> Tensor:
        """The last rows before x, [b, count, ...], with zeros before the sequence.

        Args:
            name: of these rows in the layer.
            x_bt: the rows given, [b, t, ...].
            count: how many.
        """
        return x_bt.new_zeros(x_bt.shape[0], count, *x_bt.shape[2:])

    def rows_so_far(self, name: str, x_bt: Tensor, window: int | None = None) -> Tensor:
        """The rows up to the last one given, [b, s, ...], s >= t.

        Args:
            name: of these rows in the layer.
            x_bt: the rows given, [b, t, ...].
            window: rows that a position can see, its own included: those further back may be missing. None: all.
        """
        return x_bt

    def state(self, name: str) -> Tensor | None:
        """The state before these rows, None for zeros."""
        return None

    def keep_state(self, name: str, state: Tensor) -> None:
        """Take note of the state after these rows."""


class LayerCache(Beginning):
    """What one layer has seen.

    Attributes:
        kept: by name, tensors whose first dimension is the batch.
    """

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def rows_before(self, name: str, x_bt: Tensor, count: int) -> Tensor:
        """See `Beginning.rows_before`."""
        before = self.kept.get(name)
        if before is None:
            before = super().rows_before(name, x_bt, count)
        self._keep_last(name, torch.cat([before, x_bt], 1), count)
        return before

    def rows_so_far(self, name: str, x_bt: Tensor, window: int | None = None) -> Tensor:
        """See `Beginning.rows_so_far`."""
        rows = torch.cat([self.kept[name], x_bt], 1) if name in self.kept else x_bt
        self._keep_last(name, rows, rows.shape[1] if window is None else window - 1)
        return rows

    def state(self, name: str) -> Tensor | None:
        """See `Beginning.state`."""
        return self.kept.get(name)

    def keep_state(self, name: str, state: Tensor) -> None:
        """See `Beginning.keep_state`."""
        self.kept[name] = state

    def _keep_last(self, name: str, rows: Tensor, count: int) -> None:
        last = rows[:, max(rows.shape[1] - count, 0) :]
        # A view would hold all rows in memory, and what else the layer has projected beside them.
        self.kept[name] = last.clone() if last.untyped_storage().nbytes() > last.nbytes else last


@dataclass
class RowGroup:
    """Rows of a batch with equally much padding before their first token.

    Attributes:
        padding: columns before it.
        rows: which rows of the batch.
        layers: what lies before the rows, for each layer.
    """

    padding: int
    rows: list[int]
    layers: Sequence[Beginning] = field(default_factory=list)


def group_rows(padding: Sequence[int]) -> list[RowGroup]:
    """Rows by their padding, without layers yet.

    Args:
        padding: for each row, columns before its first token.
    """
    groups = {columns: RowGroup(columns, []) for columns in padding}
    for row, columns in enumerate(padding):
        groups[columns].rows.append(row)
    return list(groups.values())


def padding_of(mask_bs: Tensor) -> tuple[list[int], bool]:
    """Columns before each row's first token, and whether a row has padding behind its last one.

    Args:
        mask_bs: 1 for tokens, 0 for padding, [b, columns seen and given].

    Raises:
        ValueError: a row has no token, or padding between tokens.
    """
    is_token = mask_bs != 0
    padding = (is_token.cumsum(1) == 0).sum(1)
    behind = (is_token.flip(1).cumsum(1) == 0).sum(1)
    between = is_token.shape[1] - is_token.sum(1) - padding - behind
    found: list[list[int]] = torch.stack([padding, behind, between]).tolist()  # one copy from the device
    if max(found[0]) == is_token.shape[1]:
        raise ValueError("attention_mask has a row without any token: leave the row out")
    if any(found[2]):
        raise ValueError("attention_mask has padding between the tokens of a row: pad on the left")
    return found[0], any(found[1])


class SelectronCache(Cache):
    """What a model has seen; made by the model's first call with `use_cache`.

    Args:
        padding: for each row of the batch, columns before its first token.
        num_layers: of the model.

    Attributes:
        num_columns: columns seen, padding included.
        groups: rows by their padding.
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
        """Columns seen, the same for every layer."""
        return self.num_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no maximum."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Columns that an attention mask has, and the first of them."""
        return self.num_columns + query_length, 0

    def reset(self) -> None:
        """Forget what was seen."""
        self.num_columns = 0
        for group in self.groups:
            group.layers = [LayerCache() for _ in range(self.num_layers)]

    def select_rows(self, index: Sequence[int]) -> None:
        """Make a batch of these rows, in this order; a row may be taken more than once.

        Args:
            index: rows of the batch as it is.
        """
        place = {row: (group, i) for group in self.groups for i, row in enumerate(group.rows)}
        self.padding = [self.padding[row] for row in index]
        chosen = group_rows(self.padding)
        for group in chosen:
            source, _ = place[index[group.rows[0]]]
            rows = [place[index[row]][1] for row in group.rows]
            group.layers = [_layer_of_rows(layer, rows) for layer in source.layers if isinstance(layer, LayerCache)]
        self.groups = chosen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """See `Cache.reorder_cache`: for beam search."""
        self.select_rows(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """See `Cache.batch_select_indices`."""
        self.select_rows(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """See `Cache.batch_repeat_interleave`."""
        self.select_rows([row for row in range(len(self.padding)) for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible: a state cannot give back what it has taken in."""
        raise ValueError("a Selectron cache cannot be cropped: its states cannot give tokens back")

    @property
    def batch_size(self) -> int:
        """Rows of the batch."""
        return len(self.padding)

    @property
    def is_compileable(self) -> bool:
        """It grows."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether something was seen."""
        return self.num_columns > 0

    @property
    def is_croppable(self) -> bool:
        """See `crop`."""
        return False


def _layer_of_rows(layer: LayerCache, rows: Sequence[int]) -> LayerCache:
    """The same layer for some of its rows."""
    chosen = LayerCache()
    chosen.kept = {name: x[torch.tensor(rows, device=x.device)] for name, x in layer.kept.items()}
    return chosen
