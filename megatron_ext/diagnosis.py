"""What each mixer would use on this machine, found out by running it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from kernels.dispatch import Choice, recorded_choices
from megatron_ext.lone_mixer import build_lone_mixer, lone_mixer_shape
from megatron_ext.mixers.registry import load_all
from megatron_ext.parallel.groups import groups_of_one_process
from megatron_ext.platform import DTYPES, Platform

LENGTH, HIDDEN, HEADS = 256, 128, 2


def implementations(platform: Platform) -> Iterator[tuple[str, list[tuple[str, Choice]]]]:
    """Each mixer with its default settings, and which implementation each of its ops took and why.

    In bf16, two heads of 64, 256 tokens, in a process group of this process alone.
    """
    with groups_of_one_process(platform.communication) as groups:
        for name in sorted(load_all()):
            yield name, _choices(name, platform, groups)


@torch.no_grad()
def _choices(name: str, platform: Platform, groups: ProcessGroupCollection) -> list[tuple[str, Choice]]:
    shape = lone_mixer_shape(name, hidden_size=HIDDEN, heads=HEADS, head_dim=HIDDEN // HEADS, length=LENGTH)
    mixer = build_lone_mixer(shape, platform, groups, seed=1)
    with recorded_choices() as found:
        mixer(torch.zeros(LENGTH, 1, HIDDEN, dtype=DTYPES[shape.precision], device=platform.device))
    return found
