"""Our mixers as layers to time, and what the plain torch forms of their ops make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from kernels.bench.checks import relative_error
from kernels.dispatch import Choice, plain_forms, recorded_choices
from megatron_ext.bench.cases import LayerShape
from megatron_ext.bench.layer import Layer, hidden_states
from megatron_ext.lone_mixer import build_lone_mixer, lone_mixer_shape
from megatron_ext.mixers.base import Mixer
from megatron_ext.platform import Platform

LIMIT = 2e-2
"""Largest ||found - expected|| / ||expected|| of an output or gradient in bf16."""

CHECKED_LENGTH = 512
"""Tokens: few enough for plain forms that hold all scores, and for MoBA to have no choice that rounding can turn."""

DRAWS = 3
"""Of hidden states and gradients to check with: in one, a norm may divide by next to nothing somewhere and magnify what
16 bits round. A form that is wrong is wrong in all."""

QUERY_GROUPS = {"nsa": 1}
"""Where it is not one a head. NSA is made for query heads that share their keys; fla's kernels ask for 16 that do."""


@dataclass(frozen=True)
class Agreement:
    """How far a mixer is from itself in plain torch.

    Attributes:
        output: relative error of the output.
        gradient: of the gradient of the hidden states.
    """

    output: float
    gradient: float

    @property
    def failure(self) -> str | None:
        """What is off, and by how much; None: nothing. NaN is off."""
        for name, error in (("output", self.output), ("gradient of the hidden states", self.gradient)):
            if not error <= LIMIT:
                return f"{name} off by {error:.1e} from the plain forms', limit {LIMIT:.0e}"
        return None


def build(name: str, shape: LayerShape, platform: Platform, groups: ProcessGroupCollection, seed: int) -> Mixer:
    """The named mixer with its default settings and initial weights, on the platform's device."""
    model = lone_mixer_shape(
        name,
        hidden_size=shape.size.hidden,
        heads=shape.size.heads,
        head_dim=shape.size.head_dim,
        length=shape.length,
        groups=QUERY_GROUPS.get(name),
    )
    return build_lone_mixer(model, platform, groups, seed)


def as_layer(mixer: Mixer) -> Layer:
    """The mixer as it is timed."""
    return Layer(run=lambda x: mixer(x)[0], parameters=tuple(mixer.parameters()), sequence_first=True)


def check(mixer: Mixer, shape: LayerShape, seed: int, device: torch.device) -> Agreement:
    """Hold a mixer, at no more than 512 tokens, against the plain torch forms of its ops.

    Args:
        mixer: what is checked.
        shape: what will be timed.
        seed: of the hidden states.
        device: where they are.

    Returns:
        The first good draw's, or the last one's.
    """
    for draw in range(DRAWS):
        agreement = _check_once(mixer, shape, seed + draw, device)
        if agreement.failure is None:
            break
    return agreement


def _check_once(mixer: Mixer, shape: LayerShape, seed: int, device: torch.device) -> Agreement:
    length = min(shape.length, CHECKED_LENGTH)
    layer = as_layer(mixer)
    x = hidden_states(layer, length=length, batch=1, hidden=shape.size.hidden, seed=seed, device=device)
    grad = torch.randn_like(x)
    found = _output_and_gradient(layer, x, grad)
    with plain_forms():
        expected = _output_and_gradient(layer, x, grad)
    # One row, one head: [b, t, heads, width] is what an error is taken over.
    errors = (relative_error(f.transpose(0, 1)[:, :, None], e.transpose(0, 1)[:, :, None])
              for f, e in zip(found, expected, strict=True))  # fmt: skip
    return Agreement(*errors)


def _output_and_gradient(layer: Layer, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    out = layer.run(x)
    (gradient,) = torch.autograd.grad(out, x, grad)
    return out.detach(), gradient


def choices(run: Callable[[], object]) -> tuple[tuple[str, Choice], ...]:
    """Which implementation each op takes in a run, and why."""
    with recorded_choices() as found:
        run()
    return tuple(dict.fromkeys(found))
