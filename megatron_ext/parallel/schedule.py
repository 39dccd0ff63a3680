"""Megatron's pipeline schedule over the model chunks of this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron_ext.parallel.watchdog import alive

ForwardStep = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]
"""Takes a micro-batch and a chunk; gives the chunk's output and what the last stage does with it."""


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
    """Send micro-batches through the pipeline; a collective call.

    Args:
        forward_step: see `ForwardStep`.
        chunks: of this rank.
        micro_batches: of this rank; every rank has as many.
        seq_length: tokens a sample, whole.
        micro_batch_size: samples a micro-batch.
        forward_only: without gradients.
        collects: what the last stage does gives any data (it is called with `non_loss_data=True`), not a loss.

    Returns:
        What the last stage has made of each micro-batch; empty on the others.
    """
    alive()
    iterators = [iter(micro_batches) for _ in chunks]
    several = len(chunks) > 1
    found: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if several else iterators[0],
        model=list(chunks) if several else chunks[0],
        num_microbatches=len(micro_batches),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        collect_non_loss_data=collects,
    )
    return found


@contextmanager
def evaluating(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within it the chunks are in evaluation mode and no gradients are kept.

    Nothing is in 8 bits: tests come in any length, which products in 8 bits do not take, and say what the weights are
    worth, however they were trained.
    """
    was_training = [chunk.training for chunk in chunks]
    blocks = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TransformerBlock)]
    in_fp8 = [block.config.fp8 for block in blocks]
    for chunk in chunks:
        chunk.eval()
    for block in blocks:
        block.config.fp8 = None
    try:
        with torch.no_grad():
            yield
    finally:
        for block, fp8 in zip(reversed(blocks), reversed(in_fp8), strict=True):  # chunks may share one configuration
            block.config.fp8 = fp8
        for chunk, training in zip(chunks, was_training, strict=True):
            chunk.train(training)
