"""Windows of fixed length over a token stream: shuffled without end for training, in order for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.data.blend import Blend
from megatron_ext.data.shards import TokenStore
from megatron_ext.data.windows import Windows, derived_seed
from megatron_ext.errors import UserError

PADDING_DOCUMENT = -1
"""Document number of labels that are no real tokens."""


class TrainingSamples:
    """Packed training samples in an order that is a pure function of (seed, index).

    Window w covers tokens [w * T, w * T + T + 1): the last token of a window, only a label there, is the first input
    of the next. The last, incomplete window is dropped. Without weights, windows of the whole stream are shuffled; with
    weights, those of each domain for themselves, and a domain that has been read through begins its next epoch.

    Args:
        store: the token stream.
        seq_length: T, input tokens a sample.
        seed: of the order.
        weights: by domain of the store, in any unit; None: domains come in proportion to their tokens.
        lost: shards that cannot be read, by the name of their tar in the manifest; no sample reads them.

    Attributes:
        num_windows: windows there are, lost ones among them.
        lost_windows: those that hold a token of a lost shard.

    Raises:
        UserError: the stream, or a domain with a weight, has fewer than T + 1 tokens, or more than half of it is lost.
        ValueError: the weights are not one for each domain, or cannot be; see `Blend`.
    """

    def __init__(
        self,
        store: TokenStore,
        seq_length: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        lost: Iterable[str] = (),
    ) -> None:
        self._store = store
        self.seq_length = seq_length
        self._blend = None if weights is None else Blend([weights[domain] for domain in store.domains])
        gone = [store.shard_range(file) for file in lost]
        if self._blend is None:
            self._windows = [Windows(0, store.num_tokens, seq_length, seed, gone)]
            _check(self._windows[0], seq_length, store.num_tokens, "the training data")
        else:
            self._windows = [
                Windows(*store.domain_range(domain), seq_length, derived_seed(seed, domain), gone)
                for domain in store.domains
            ]
            for domain, windows, share in zip(store.domains, self._windows, self._blend.shares, strict=True):
                if share:
                    _check(windows, seq_length, store.domain_range(domain)[1], domain)
        self.num_windows = sum(windows.total for windows in self._windows)
        self.lost_windows = sum(windows.lost for windows in self._windows)

    def place(self, index: int) -> int:
        """First token, in the stream, of sample `index` >= 0, without end."""
        domain, number = (0, index) if self._blend is None else self._blend.place(index)
        return self._windows[domain].place(number)

    def __getitem__(self, index: int) -> npt.NDArray[np.generic]:
        """Sample `index` >= 0, without end: array [T + 1] of the tokens as they are stored; see `TokenStore.read`."""
        return self._store.read(self.place(index), self.seq_length + 1)

    def document_starts(self, index: int) -> npt.NDArray[np.int64]:
        """Which of the T + 1 tokens of sample `index` are the first of a document: int64, ascending."""
        return self._store.document_starts(self.place(index), self.seq_length + 1)


def _check(windows: Windows, seq_length: int, tokens: int, where: str) -> None:
    """Refuse a stretch of the stream without a window, or without enough whole ones."""
    if windows.total < 1:
        problem = f"{seq_length} needs {seq_length + 1} tokens, {where} has {tokens}"
        raise UserError("data.seq_length", problem, "give more data or a shorter sequence")
    if windows.too_few:
        problem = f"skip would leave out {windows.lost} of the {windows.total} samples an epoch of {where}"
        raise UserError("data.on_damaged", problem, "copy the damaged shards again or prepare the data again")


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

    def document_starts(self, index: int) -> npt.NDArray[np.int64]:
        """Which of the T + 1 tokens of sample `index` are the first of a document: int64, ascending; no padding."""
        if index >= self._length:
            return np.empty(0, dtype=np.int64)
        start = self._start(index)
        return self._store.document_starts(start, min(self.seq_length + 1, self._store.num_tokens - start))

    def first_tokens(self) -> npt.NDArray[np.int64]:
        """First tokens of the documents that begin in a window: the stream's own, and those among labels."""
        found = []
        for index in range(self._length):
            starts = self.document_starts(index)
            found.append(self[index].tokens[starts if self._start(index) == 0 else starts[starts > 0]])
        return np.concatenate(found)

    def _start(self, index: int) -> int:
        """First token of a sample in the stream."""
        return index * self._windows // self._length * self.seq_length

    def __getitem__(self, index: int) -> EvaluationSample:
        """Sample `index`; beyond the end an empty one, all padding, so that ranks can take equal numbers of samples."""
        tokens = np.zeros(self.seq_length + 1, dtype=np.int64)
        documents = np.full(self.seq_length, PADDING_DOCUMENT, dtype=np.int64)
        if index < self._length:
            start = self._start(index)
            labels = min(self.seq_length, self._store.num_tokens - 1 - start)
            tokens[: labels + 1] = self._store.read(start, labels + 1)
            documents[:labels] = self._store.document_ids(start + 1, labels)
        return EvaluationSample(tokens, (documents != PADDING_DOCUMENT).astype(np.float32), documents)
