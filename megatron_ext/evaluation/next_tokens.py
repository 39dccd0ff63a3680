"""What a model says of the tokens that come next, under any layout: how likely these are, and if any is likelier.

Only the positions that are asked for are multiplied with the vocabulary: the logits of all of a long text would take
more memory than the model.
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
from megatron_ext.parallel.schedule import evaluating, run_schedule
from megatron_ext.platform import Platform

NOTHING = -1
"""In place of a token where none is asked for."""


@dataclass(frozen=True)
class Text:
    """Tokens that a model reads.

    Attributes:
        tokens: at least one.
        targets: what comes after each of the last ones of them, or `NOTHING`, where that is not asked for.
    """

    tokens: Sequence[int]
    targets: Sequence[int]


@dataclass(frozen=True)
class Answers:
    """What a model says of some texts, on every rank; n texts.

    Attributes:
        log_probabilities: float64 [n], of all targets of a text, nats.
        misses: int64 [n], targets that are not the likeliest token, the lowest one of equals.
    """

    log_probabilities: Tensor
    misses: Tensor


@dataclass(frozen=True)
class _MicroBatch:
    """Part of the texts, cut to this rank's t = T / cp positions.

    Attributes:
        tokens: int64 [b, t].
        positions: int64 [b, t].
        targets: int64 [b, t]; `NOTHING` where none is asked for.
        numbers: int64 [b], which texts they are; `NOTHING` for padding.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    numbers: Tensor


class NextTokens:
    """Forward passes that ask a model for what comes next; its calls are collective.

    Texts are sorted by length, so that those read together have little padding, which stands behind the text, where
    no causal mixer sees it.

    Args:
        chunks: of the model on this rank, see `build_model`.
        groups: process groups.
        platform: where this runs.
        vocab_size: tokens to choose from; rows of padding beyond it count for nothing.
        micro_batch_size: texts a forward pass.
        multiple: lengths are padded to a multiple of it, which the layout must be able to cut.
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

    def __call__(self, texts: Sequence[Text]) -> Answers:
        """Ask for all texts, which every rank gives alike."""
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number].tokens))
        found = torch.zeros(len(texts), 2, dtype=torch.float64, device=self._platform.device)
        with evaluating(self._chunks), without_output_layer(self._chunks) as output:
            for numbers in self._rounds(order):
                for micro_batch, answers_b2 in self._run(texts, numbers, output):
                    is_text = micro_batch.numbers != NOTHING
                    found.index_add_(0, micro_batch.numbers[is_text], answers_b2[is_text])
        dist.all_reduce(found, group=self._groups.dp_cp)
        dist.broadcast(found, dist.get_process_group_ranks(self._groups.pp)[-1], group=self._groups.pp)
        log_probabilities, misses = found.cpu().unbind(1)
        return Answers(log_probabilities, misses.long())

    def _rounds(self, order: Sequence[int]) -> Iterator[list[int]]:
        """Numbers of the texts of one run of the schedule, in all data-parallel ranks."""
        per_round = self._micro_batch_size * self._groups.dp.size() * self._groups.pp.size()
        for first in range(0, len(order), per_round):
            yield list(order[first : first + per_round])

    def _run(
        self, texts: Sequence[Text], numbers: Sequence[int], output: OutputLayer | None
    ) -> list[tuple[_MicroBatch, Tensor]]:
        """This rank's micro-batches with [b, 2] sums each; empty but on the last pipeline stage."""
        longest = max(len(texts[number].tokens) for number in numbers)
        length = -(-longest // self._multiple) * self._multiple
        batches = [self._micro_batch(texts, numbers, index, length) for index in range(self._groups.pp.size())]
        answers: list[Tensor] = run_schedule(
            partial(_forward_step, partial(self._ask, output)),
            self._chunks,
            batches,
            seq_length=length,
            micro_batch_size=self._micro_batch_size,
            forward_only=True,
            collects=True,
        )
        return list(zip(batches, answers, strict=True)) if output is not None else []

    def _micro_batch(self, texts: Sequence[Text], numbers: Sequence[int], index: int, length: int) -> _MicroBatch:
        groups, size = self._groups, self._micro_batch_size
        places = micro_batch_indices(0, index, size, groups.dp.rank(), groups.dp.size())
        own = [numbers[place] if place < len(numbers) else NOTHING for place in places]
        tokens = torch.zeros(size, length, dtype=torch.int64)
        targets = torch.full_like(tokens, NOTHING)
        for row, number in enumerate(own):
            if number == NOTHING:
                continue
            text = texts[number]
            end = len(text.tokens)
            tokens[row, :end] = torch.tensor(text.tokens)
            targets[row, end - len(text.targets) : end] = torch.tensor(text.targets, dtype=torch.int64)
        positions = torch.arange(length).expand(size, -1)
        cut = partial(_cut, rank=groups.cp.rank(), size=groups.cp.size(), device=self._platform.device)
        placed = torch.tensor(own, device=self._platform.device)
        return _MicroBatch(cut(tokens), cut(positions), cut(targets), placed)

    def _ask(self, output: OutputLayer | None, batch: _MicroBatch, hidden_tbh: Tensor) -> Tensor:
        """Sums [b, 2] over this rank's positions: log-probabilities, misses."""
        assert output is not None, "the schedule asks on the last stage"
        asked = batch.targets != NOTHING
        hidden_nh = output.whole_sequence(hidden_tbh).transpose(0, 1)[asked]
        targets_n = batch.targets[asked]
        log_p_n, best_n = self._vocabulary.ask(hidden_nh, output.weight_vh, targets_n)
        answers_n2 = torch.stack([log_p_n, (best_n != targets_n).double()], dim=1)
        rows_n = asked.nonzero()[:, 0]
        sums_b2 = torch.zeros(len(batch.numbers), 2, dtype=torch.float64, device=answers_n2.device)
        return sums_b2.index_add_(0, rows_n, answers_n2)


@dataclass(frozen=True)
class OutputLayer:
    """The last step of a model on the last pipeline stage.

    Attributes:
        weight_vh: [v / tp, hidden], this rank's rows of the vocabulary.
        sequence_group: ranks that hold parts of the sequence before it; None: it is whole.
    """

    weight_vh: Tensor
    sequence_group: dist.ProcessGroup | None

    def whole_sequence(self, hidden_tbh: Tensor) -> Tensor:
        """What sequence parallelism has scattered, put together."""
        if self.sequence_group is None:
            return hidden_tbh
        gathered: Tensor = gather_from_sequence_parallel_region(
            hidden_tbh, tensor_parallel_output_grad=False, group=self.sequence_group
        )
        return gathered


@contextmanager
def without_output_layer(chunks: Sequence[torch.nn.Module]) -> Iterator[OutputLayer | None]:
    """Within it the model gives its last hidden states [t, b, hidden].

    Yields:
        Its output layer; None on ranks without one.
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


def _forward_step(ask: Any, batches: Iterator[_MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Any]:
    batch = next(batches)
    hidden_tbh = model(batch.tokens, batch.positions, attention_mask=None)
    return hidden_tbh, lambda hidden, non_loss_data: ask(batch, hidden)


def _cut(whole_bt: Tensor, rank: int, size: int, device: torch.device) -> Tensor:
    """This context-parallel rank's contiguous part, on its device."""
    return whole_bt.chunk(size, dim=1)[rank].contiguous().to(device)
