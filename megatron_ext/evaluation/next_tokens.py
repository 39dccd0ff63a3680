"""Log-probabilities and wrong predictions of given next tokens, under any parallel layout.

The output layer is applied only to the requested positions. The logits of all positions of a long text would take more
memory than the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_ext.data.batches import micro_batch_indices
from megatron_ext.evaluation.vocabulary import Vocabulary
from megatron_ext.model.pipeline_schedule import evaluation_mode, run_schedule
from megatron_ext.platform.device import Platform

NO_TARGET = -1
"""Placeholder for a target that is not requested, and for the text index of a padding row."""


@dataclass(frozen=True)
class ScoredText:
    """Input tokens, and the next tokens to score at the last positions.

    Attributes:
        tokens: input tokens, at least one.
        targets: next token of each of the last `len(targets)` positions, or `NO_TARGET` where it is not requested.
    """

    tokens: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class NextTokenScores:
    """Results of n texts, the same on every rank.

    Attributes:
        log_probabilities: float64 [n], sum of the log-probabilities of each text's targets, in nats.
        misses: int64 [n], number of each text's targets that are not the most likely token. Among equally likely tokens
            the lowest id counts as the most likely.
    """

    log_probabilities: Tensor
    misses: Tensor


@dataclass(frozen=True)
class _MicroBatch:
    """Micro-batch of texts, sharded to this context-parallel rank's t = T / cp positions.

    Attributes:
        tokens: int64 [b, t], input tokens.
        positions: int64 [b, t], position of each token in the text.
        targets: int64 [b, t], next token; `NO_TARGET` where no target is requested.
        text_indices: int64 [b], index of each text; `NO_TARGET` for a row of padding.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    text_indices: Tensor


class NextTokens:
    """Scorer of given next tokens by forward passes. Calls are collective.

    Texts are sorted by length, so that a micro-batch has little padding. Padding is appended to a text, where it does
    not affect a causal mixer.

    Args:
        chunks: model chunks of this rank, as `build_model` returns them.
        groups: process groups.
        platform: device and backend.
        vocab_size: number of tokens in the vocabulary. Padding rows of the output layer are ignored.
        micro_batch_size: number of texts per forward pass.
        multiple: lengths are padded to a multiple of this number, which the layout must be able to shard.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        groups: ProcessGroupCollection,
        platform: Platform,
        *,
        vocab_size: int,
        micro_batch_size: int,
        multiple: int,
    ) -> None:
        self._chunks, self._groups, self._platform = list(chunks), groups, platform
        self._vocabulary = Vocabulary(vocab_size, groups.tp)
        self._micro_batch_size, self._multiple = micro_batch_size, multiple

    def __call__(self, texts: Sequence[ScoredText]) -> NextTokenScores:
        """Score the targets of all texts. Every rank must pass the same texts."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index].tokens))
        sums_n2 = torch.zeros(len(texts), 2, dtype=torch.float64, device=self._platform.device)
        with evaluation_mode(self._chunks), without_output_layer(self._chunks) as output:
            for text_indices in self._rounds(order):
                for micro_batch, scores_b2 in self._run(texts, text_indices, output):
                    is_text = micro_batch.text_indices != NO_TARGET
                    sums_n2.index_add_(0, micro_batch.text_indices[is_text], scores_b2[is_text])
        dist.all_reduce(sums_n2, group=self._groups.dp_cp)
        dist.broadcast(sums_n2, dist.get_process_group_ranks(self._groups.pp)[-1], group=self._groups.pp)
        log_probabilities, misses = sums_n2.cpu().unbind(1)
        return NextTokenScores(log_probabilities, misses.long())

    def _rounds(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of the texts of each run of the pipeline schedule, over all data-parallel ranks."""
        per_round = self._micro_batch_size * self._groups.dp.size() * self._groups.pp.size()
        for first in range(0, len(order), per_round):
            yield list(order[first : first + per_round])

    def _run(
        self, texts: Sequence[ScoredText], text_indices: Sequence[int], output: OutputLayer | None
    ) -> list[tuple[_MicroBatch, Tensor]]:
        """Return this rank's micro-batches with the sums [b, 2] of `_score`; empty before the last pipeline stage."""
        longest = max(len(texts[index].tokens) for index in text_indices)
        length = -(-longest // self._multiple) * self._multiple
        batches = [self._micro_batch(texts, text_indices, index, length) for index in range(self._groups.pp.size())]
        scores: list[Tensor] = run_schedule(
            partial(_forward_step, partial(self._score, output)),
            self._chunks,
            batches,
            seq_length=length,
            micro_batch_size=self._micro_batch_size,
            forward_only=True,
            collects=True,
        )
        return list(zip(batches, scores, strict=True)) if output is not None else []

    def _micro_batch(
        self, texts: Sequence[ScoredText], text_indices: Sequence[int], index: int, length: int
    ) -> _MicroBatch:
        groups, size = self._groups, self._micro_batch_size
        slots = micro_batch_indices(0, index, size, groups.dp.rank(), groups.dp.size())
        local_indices = [text_indices[slot] if slot < len(text_indices) else NO_TARGET for slot in slots]
        tokens = torch.zeros(size, length, dtype=torch.int64)
        targets = torch.full_like(tokens, NO_TARGET)
        for row, text_index in enumerate(local_indices):
            if text_index == NO_TARGET:
                continue
            text = texts[text_index]
            end = len(text.tokens)
            tokens[row, :end] = torch.tensor(text.tokens)
            targets[row, end - len(text.targets) : end] = torch.tensor(text.targets, dtype=torch.int64)
        positions = torch.arange(length).expand(size, -1)
        shard = partial(_local_shard, rank=groups.cp.rank(), size=groups.cp.size(), device=self._platform.device)
        text_indices_b = torch.tensor(local_indices, device=self._platform.device)
        return _MicroBatch(shard(tokens), shard(positions), shard(targets), text_indices_b)

    def _score(self, output: OutputLayer | None, batch: _MicroBatch, hidden_tbh: Tensor) -> Tensor:
        """Return the sums of log-probabilities and misses over this rank's positions, float64 [b, 2]."""
        assert output is not None, "the schedule collects outputs on the last stage"
        is_requested = batch.targets != NO_TARGET
        hidden_nh = output.whole_sequence(hidden_tbh).transpose(0, 1)[is_requested]
        targets_n = batch.targets[is_requested]
        log_p_n, best_n = self._vocabulary.score(hidden_nh, output.weight_vh, targets_n)
        scores_n2 = torch.stack([log_p_n, (best_n != targets_n).double()], dim=1)
        rows_n = is_requested.nonzero()[:, 0]
        sums_b2 = torch.zeros(len(batch.text_indices), 2, dtype=torch.float64, device=scores_n2.device)
        return sums_b2.index_add_(0, rows_n, scores_n2)


@dataclass(frozen=True)
class OutputLayer:
    """Output layer of a model, on the last pipeline stage.

    Attributes:
        weight_vh: [v / tp, hidden_size], this tensor-parallel rank's rows of the weight.
        sequence_group: sequence-parallel group over which the hidden states are sharded; None: they are not sharded.
    """

    weight_vh: Tensor
    sequence_group: dist.ProcessGroup | None

    def whole_sequence(self, hidden_tbh: Tensor) -> Tensor:
        """Gather the hidden states [t, b, hidden_size] over the sequence-parallel group."""
        if self.sequence_group is None:
            return hidden_tbh
        gathered: Tensor = gather_from_sequence_parallel_region(
            hidden_tbh, tensor_parallel_output_grad=False, group=self.sequence_group
        )
        return gathered


@contextmanager
def without_output_layer(chunks: Sequence[torch.nn.Module]) -> Iterator[OutputLayer | None]:
    """Context manager in which the model returns its last hidden states [t, b, hidden_size] instead of logits.

    Yields:
        The output layer; None on ranks without an output layer.
    """
    models: list[GPTModel] = [unwrap_model(chunk) for chunk in chunks]
    last = next((model for model in models if model.post_process), None)
    output = None
    if last is not None:
        tied = last.share_embeddings_and_output_weights
        weight_vh = last.shared_embedding_or_output_weight() if tied else last.output_layer.weight
        output = OutputLayer(weight_vh, last.pg_collection.tp if last.config.sequence_parallel else None)
        last.post_process = False
    try:
        yield output
    finally:
        if last is not None:
            last.post_process = True


def _forward_step(score: Any, batches: Iterator[_MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    hidden_tbh = model(batch.tokens, batch.positions, attention_mask=None)
    return hidden_tbh, lambda hidden, non_loss_data: score(batch, hidden)


def _local_shard(whole_bt: Tensor, rank: int, size: int, device: torch.device) -> Tensor:
    """Return this context-parallel rank's contiguous part of the sequence on the device."""
    return whole_bt.chunk(size, dim=1)[rank].contiguous().to(device)
