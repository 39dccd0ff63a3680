"""Detection of the implementations that each mixer uses on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from kernels.common.dispatch import Choice, meta_as_this_gpu, recorded_choices
from kernels.meta.unlaunched import unlaunched
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.model.meta_device import on_meta
from megatron_ext.model.single_mixer import build_lone_mixer, lone_mixer_shape
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform.device import DTYPES, Platform

LENGTH, HIDDEN, HEADS = 256, 128, 2


def implementations(platform: Platform) -> Iterator[tuple[str, list[tuple[str, Choice]]]]:
    """Iterate over the mixers with the implementation that each of their ops chose, and the reason.

    Each runs with its default settings in bf16, with two heads of 64 and 256 tokens, in a single-process group. On a
    GPU, meta tensors take the place of the GPU's, and no kernel is launched: to compile all kernels, and to autotune
    those of flash-linear-attention, takes minutes.
    """
    with groups_of_one_process(platform.communication) as groups:
        for name in sorted(load_all()):
            yield name, _choices(name, platform, groups)


@torch.no_grad()
def _choices(name: str, platform: Platform, groups: ProcessGroupCollection) -> list[tuple[str, Choice]]:
    shape = lone_mixer_shape(name, hidden_size=HIDDEN, heads=HEADS, head_dim=HIDDEN // HEADS, length=LENGTH)
    with ExitStack() as stack:
        if platform.is_cuda:
            platform = Platform(torch.device("meta"), platform.communication)
            for context in (on_meta(), unlaunched(), meta_as_this_gpu()):
                stack.enter_context(context)
        mixer = build_lone_mixer(shape, platform, groups, seed=1)
        choices = stack.enter_context(recorded_choices())
        mixer(torch.zeros(LENGTH, 1, HIDDEN, dtype=DTYPES[shape.precision], device=platform.device))
    return choices
