"""Megatron's pipeline schedule over the model chunks of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_ext.parallel.watchdog import record_progress

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Function from micro-batches and a chunk to the chunk's output and the function that the last stage applies to it."""


def run_schedule(
    forward_step: ForwardStep,
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Any],
    *,
    seq_length: int,
    micro_batch_size: int,
    forward_only: bool,
    collects: bool = False,
) -> list[Any]:
    """Run micro-batches through the pipeline; a collective call.

    Args:
        forward_step: see `ForwardStep`.
        chunks: model chunks of this rank.
        micro_batches: micro-batches of this rank; every rank has equally many.
        seq_length: tokens per sample of the whole sequence.
        micro_batch_size: samples per micro-batch.
        forward_only: True: no backward pass.
        collects: True: the last stage's function is called with `non_loss_data=True` and may return any data.

    Returns:
        Results of the last stage's function, one per micro-batch; empty on other stages.
    """
    record_progress()
    iterators = [iter(micro_batches) for _ in chunks]
    has_several_chunks = len(chunks) > 1
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if has_several_chunks else iterators[0],
        model=list(chunks) if has_several_chunks else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=collects,
    )
    return results


@contextmanager
def evaluation_mode(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Context manager that sets the chunks to evaluation mode, without gradients and without FP8.

    FP8 matrix products do not take every sequence length of the tests. The tests also measure the weights however they
    were trained.
    """
    was_training = [chunk.training for chunk in chunks]
    blocks = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerBlock)]
    fp8_recipes = [block.config.fp8 for block in blocks]
    for chunk in chunks:
        chunk.eval()
    for block in blocks:
        block.config.fp8 = None
    try:
        with torch.no_grad():
            yield
    finally:
        for block, fp8 in zip(
            reversed(blocks), reversed(fp8_recipes), strict=True
        ):  # chunks may share one configuration
            block.config.fp8 = fp8
        for chunk, training in zip(chunks, was_training, strict=True):
            chunk.train(training)
