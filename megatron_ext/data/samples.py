"""Windows of fixed length over a token stream: shuffled without end for training, in order for evaluation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.data.order import sample_position
from megatron_ext.data.shards import TokenStore
from megatron_ext.errors import UserError

PADDING_DOCUMENT = -1
"""Document number of labels that are no real tokens."""


class TrainingSamples:
    """Packed training samples in an order that is a pure function of (seed, index).

    Window w covers tokens [w * T, w * T + T + 1): the last token of a window, only a label there, is the first input
    of the next. The last, incomplete window is dropped.

    Args:
        store: the token stream.
        seq_length: T, input tokens a sample.
        seed: of the order.

    Raises:
        UserError: the stream has fewer than T + 1 tokens.
    """

    def __init__(self, store: TokenStore, seq_length: int, seed: int) -> None:
        self._store = store
        self._seed = seed
        self.seq_length = seq_length
        self.num_windows = (store.num_tokens - 1) // seq_length
        if self.num_windows < 1:
            problem = f"{seq_length} needs {seq_length + 1} tokens, the training data has {store.num_tokens}"
            raise UserError("data.seq_length", problem, "give more data or a shorter sequence")

    def __getitem__(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index` >= 0, without end: int64 array [T + 1]."""
        window = sample_position(self._seed, index, self.num_windows)
        return self._store.read(window * self.seq_length, self.seq_length + 1)


@dataclass(frozen=True)
class EvaluationSample:
    """One evaluation window.

    Attributes:
        tokens: int64 [T + 1]; 0 on padding.
        loss_mask: float32 [T], 1 where the label is a real token.
        document_ids: int64 [T], the document of each label, counted over the store; -1 on padding.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    document_ids: npt.NDArray[np.int64]


class EvaluationSamples:
    """Windows in order; every label of the stream is in exactly one of them when none is left out.

    Args:
        store: the token stream.
        seq_length: T, input tokens a sample.
        max_samples: windows at most, spread evenly over the stream so that many documents are hit; 0: all.

    Raises:
        UserError: the stream has no label (fewer than 2 tokens).
    """

    def __init__(self, store: TokenStore, seq_length: int, max_samples: int = 0) -> None:
        if store.num_tokens < 2:
            problem = f"only {store.num_tokens} tokens of {', '.join(store.domains)} to evaluate on"
            raise UserError("data.test_domains", problem, "prepare more documents of it")
        self._store = store
        self._windows = -(-(store.num_tokens - 1) // seq_length)
        self._length = min(self._windows, max_samples) if max_samples else self._windows
        self.seq_length = seq_length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> EvaluationSample:
        """Sample `index`; beyond the end an empty one, all padding, so that ranks can take equal numbers of samples."""
        tokens = np.zeros(self.seq_length + 1, dtype=np.int64)
        documents = np.full(self.seq_length, PADDING_DOCUMENT, dtype=np.int64)
        if index < self._length:
            start = index * self._windows // self._length * self.seq_length
            labels = min(self.seq_length, self._store.num_tokens - 1 - start)
            tokens[: labels + 1] = self._store.read(start, labels + 1)
            documents[:labels] = self._store.document_ids(start + 1, labels)
        return EvaluationSample(tokens, (documents != PADDING_DOCUMENT).astype(np.float32), documents)
