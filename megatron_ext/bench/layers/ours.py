"""Our mixers as layers to time, and their comparison with the plain torch forms of their ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from kernels.bench.checks import relative_error
from kernels.common.dispatch import Choice, plain_torch, recorded_choices
from megatron_ext.bench.layers.cases import LayerShape
from megatron_ext.bench.layers.layer import Layer, hidden_states
from megatron_ext.mixers.core.base import Mixer
from megatron_ext.model.single_mixer import build_lone_mixer, lone_mixer_shape
from megatron_ext.platform.device import Platform

MAX_ERROR = 2e-2
"""Maximum relative error ||found - expected|| / ||expected|| of an output or gradient in bf16."""

CHECKED_LENGTH = 512
"""Tokens for the comparison: few enough for plain torch, which materialises all scores, and for MoBA's selection to be
independent of rounding.
"""

MAX_DRAWS = 3
"""Maximum number of random inputs to compare with. For one input, a norm may divide by almost zero and amplify rounding
in bf16. An incorrect implementation fails for all inputs.
"""

QUERY_GROUPS = {"nsa": 1}
"""Query groups of mixers that do not have one per head. NSA is designed for query heads that share keys; fla's kernels
need 16 per group.
"""


@dataclass(frozen=True)
class Agreement:
    """Deviation of a mixer from its plain torch implementation.

    Attributes:
        output: relative error of the output.
        gradient: relative error of the gradient of the hidden states.
    """

    output: float
    gradient: float

    @property
    def failure(self) -> str | None:
        """Description of an error above the limit, or NaN; None: there is none."""
        for name, error in (("output", self.output), ("gradient of the hidden states", self.gradient)):
            if not error <= MAX_ERROR:
                return f"{name} off by {error:.1e} from plain torch, limit {MAX_ERROR:.0e}"
        return None


def build(name: str, shape: LayerShape, platform: Platform, groups: ProcessGroupCollection, seed: int) -> Mixer:
    """Build the named mixer with default settings and initial weights, on the platform's device."""
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
    """Return the mixer as a layer to time."""
    return Layer(run=lambda x: mixer(x)[0], parameters=tuple(mixer.parameters()), sequence_first=True)


def check(mixer: Mixer, shape: LayerShape, seed: int, device: torch.device) -> Agreement:
    """Compare a mixer with the plain torch forms of its ops, at no more than 512 tokens.

    Args:
        mixer: to check.
        shape: that will be timed.
        seed: of the hidden states.
        device: of the hidden states.

    Returns:
        Agreement for the first input that passes, or for the last one.
    """
    for draw in range(MAX_DRAWS):
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
    with plain_torch():
        expected = _output_and_gradient(layer, x, grad)
    # Relative errors are computed over [b, t, heads, width]; here with one row and one head.
    errors = (relative_error(f.transpose(0, 1)[:, :, None], e.transpose(0, 1)[:, :, None])
              for f, e in zip(found, expected, strict=True))  # fmt: skip
    return Agreement(*errors)


def _output_and_gradient(layer: Layer, x: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    out = layer.run(x)
    (gradient,) = torch.autograd.grad(out, x, grad)
    return out.detach(), gradient


def choices(run: Callable[[], object]) -> tuple[tuple[str, Choice], ...]:
    """Return the implementation that each op chooses in a run, and why."""
    with recorded_choices() as found:
        run()
    return tuple(dict.fromkeys(found))
