"""Fixed-length windows over a token stream: shuffled and unbounded for training, sequential for evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_ext.data.blend import Blend
from megatron_ext.data.shards import TokenStore
from megatron_ext.data.windows import Windows, derived_seed
from megatron_ext.utils.errors import UserError

PADDING_DOCUMENT = -1
"""Document index of labels that are padding."""


class TrainingSamples:
    """Packed training samples in an order that is a pure function of (seed, index).

    Window w covers tokens [w * T, w * T + T + 1). Its last token is only a label, and is the first input of the next
    window. The last, incomplete window is dropped. Without weights, the windows of the whole stream are shuffled
    together. With weights, the windows of each domain are shuffled separately, and a domain whose windows are exhausted
    starts its next epoch.

    Args:
        store: the token stream.
        seq_length: T, input tokens per sample.
        seed: seed of the order.
        weights: weight of each domain of the store, in any unit. None: domains appear in proportion to their tokens.
        lost: tar names, as in the manifest, of shards that cannot be read. No sample reads them.

    Attributes:
        num_windows: number of windows, including lost ones.
        lost_windows: number of windows with a token of a lost shard.

    Raises:
        UserError: the stream, or a domain with a positive weight, has fewer than T + 1 tokens, or more than half of its
            windows are lost.
        ValueError: the weights are invalid (see `Blend`).
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
        lost_ranges = [store.shard_range(file) for file in lost]
        if self._blend is None:
            self._windows = [Windows(0, store.num_tokens, seq_length, seed, lost_ranges)]
            _check_windows(self._windows[0], seq_length, store.num_tokens, "the training data")
        else:
            self._windows = [
                Windows(*store.domain_range(domain), seq_length, derived_seed(seed, domain), lost_ranges)
                for domain in store.domains
            ]
            for domain, windows, share in zip(store.domains, self._windows, self._blend.shares, strict=True):
                if share:
                    _check_windows(windows, seq_length, store.domain_range(domain)[1], domain)
        self.num_windows = sum(windows.total for windows in self._windows)
        self.lost_windows = sum(windows.lost for windows in self._windows)

    def token_offset(self, index: int) -> int:
        """Return the offset in the stream of the first token of sample `index` >= 0, which is unbounded."""
        domain, sample = (0, index) if self._blend is None else self._blend.locate(index)
        return self._windows[domain].token_offset(sample)

    def __getitem__(self, index: int) -> npt.NDArray[np.generic]:
        """Return sample `index` >= 0, unbounded: array [T + 1] in the stored dtype (see `TokenStore.read`)."""
        return self._store.read(self.token_offset(index), self.seq_length + 1)

    def document_starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the offset of each document's first token among the T + 1 tokens of a sample: int64, ascending."""
        return self._store.document_starts(self.token_offset(index), self.seq_length + 1)


def _check_windows(windows: Windows, seq_length: int, tokens: int, name: str) -> None:
    """Raise a `UserError` for a range of the stream that has no window, or too few readable windows."""
    if windows.total < 1:
        problem = f"{seq_length} needs {seq_length + 1} tokens, but {name} has {tokens}"
        raise UserError("data.seq_length", problem, "provide more data or reduce it")
    if windows.has_lost_too_many:
        problem = f"skip would drop {windows.lost} of the {windows.total} samples per epoch of {name}"
        raise UserError("data.on_damaged", problem, "copy the damaged shards again or prepare the data again")


@dataclass(frozen=True)
class EvaluationSample:
    """Evaluation window.

    Attributes:
        tokens: int64 [T + 1], 0 on padding.
        loss_mask: float32 [T], 1 where the label is a real token.
        document_ids: int64 [T], index of each label's document in the whole store, -1 on padding.
    """

    tokens: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.float32]
    document_ids: npt.NDArray[np.int64]


class EvaluationSamples:
    """Sequential windows of the stream. With all windows, every label of the stream is in exactly one window.

    Args:
        store: the token stream.
        seq_length: T, input tokens per sample.
        max_samples: maximum number of windows, spread evenly over the stream to cover many documents. 0: all windows.

    Raises:
        UserError: the stream has no label (fewer than 2 tokens).
    """

    def __init__(self, store: TokenStore, seq_length: int, max_samples: int = 0) -> None:
        if store.num_tokens < 2:
            problem = f"{', '.join(store.domains)} has only {store.num_tokens} tokens to evaluate"
            raise UserError("data.test_domains", problem, "prepare more documents of it")
        self._store = store
        self._windows = -(-(store.num_tokens - 1) // seq_length)
        self._length = min(self._windows, max_samples) if max_samples else self._windows
        self.seq_length = seq_length

    def __len__(self) -> int:
        return self._length

    def document_starts(self, index: int) -> npt.NDArray[np.int64]:
        """Return the offset of each document's first token in sample `index`, without padding: int64, ascending."""
        if index >= self._length:
            return np.empty(0, dtype=np.int64)
        start = self._start(index)
        return self._store.document_starts(start, min(self.seq_length + 1, self._store.num_tokens - start))

    def first_tokens(self) -> npt.NDArray[np.int64]:
        """Return the token ids at the beginning of documents: int64 [n].

        These are the first token of the stream, if window 0 is read, and the labels that begin a document.
        """
        found = []
        for index in range(self._length):
            starts = self.document_starts(index)
            found.append(self[index].tokens[starts if self._start(index) == 0 else starts[starts > 0]])
        return np.concatenate(found)

    def _start(self, index: int) -> int:
        """Return the offset in the stream of the first token of a sample."""
        return index * self._windows // self._length * self.seq_length

    def __getitem__(self, index: int) -> EvaluationSample:
        """Return sample `index`.

        A sample beyond the end is all padding, so that all ranks can read equally many samples.
        """
        tokens = np.zeros(self.seq_length + 1, dtype=np.int64)
        documents = np.full(self.seq_length, PADDING_DOCUMENT, dtype=np.int64)
        if index < self._length:
            start = self._start(index)
            labels = min(self.seq_length, self._store.num_tokens - 1 - start)
            tokens[: labels + 1] = self._store.read(start, labels + 1)
            documents[:labels] = self._store.document_ids(start + 1, labels)
        return EvaluationSample(tokens, (documents != PADDING_DOCUMENT).astype(np.float32), documents)
