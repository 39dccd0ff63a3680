"""Detection of a rank's first non-finite gradient, before the reduction spreads it to all ranks.

The check costs a pass over every gradient. It is therefore done only when a step is repeated because its gradient norm
was not finite. The check uses autograd hooks, so it works with every optimizer. Megatron and DeepSpeed reduce and
release a gradient (ZeRO-2 and ZeRO-3 during the backward pass) only after autograd has computed it.

Limitations: the ranks of a model-parallel group exchange gradients in the backward pass, so the check may find all
ranks of the group. If the sum over ranks overflows although each rank's gradient is finite, the check finds no rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

_LAYER = re.compile(r"(.*layers\.)\d+")


@contextmanager
def checked_gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[Callable[[], str | None]]:
    """Context manager that checks the gradients of model chunks while the backward pass computes them.

    Args:
        chunks: model chunks of this rank, with or without wrappers.

    Yields:
        Function to call after the backward pass. It returns the name of the parameter with the first non-finite
        gradient, or None if all gradients were finite.
    """
    results: list[tuple[str, Tensor]] = []

    def make_hook(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: results.append((name, gradient.isfinite().all()))

    parameters = [pair for chunk in chunks for pair in named_parameters_in_model(chunk) if pair[1].requires_grad]
    hooks = [parameter.register_hook(make_hook(name)) for name, parameter in parameters]
    try:
        # The results stay on the device until the end, because reading each one would synchronize with the device.
        yield lambda: next((name for name, is_finite in results if not is_finite), None)
    finally:
        for hook in hooks:
            hook.remove()


def named_parameters_in_model(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with their names in the whole model, with layers numbered across pipeline stages."""
    layers = {
        name: f"{found[1]}{module.layer_number - 1}"
        for name, module in chunk.named_modules()
        if (found := _LAYER.fullmatch(name)) and isinstance(getattr(module, "layer_number", None), int)
    }
    for name, parameter in chunk.named_parameters():
        stage_layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        full_name = name if stage_layer is None else layers[stage_layer] + name.removeprefix(stage_layer)
        yield re.sub(r"^(module\.)+", "", full_name), parameter
