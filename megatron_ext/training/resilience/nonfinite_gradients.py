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
def watched_gradients(chunks: Sequence[torch.nn.Module]) -> Iterator[Callable[[], str | None]]:
    """Context manager that checks the gradients of model chunks while the backward pass computes them.

    Args:
        chunks: model chunks of this rank, with or without wrappers.

    Yields:
        Function to call after the backward pass. It returns the name of the parameter with the first non-finite
        gradient, or None if all gradients were finite.
    """
    seen: list[tuple[str, Tensor]] = []

    def look(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: seen.append((name, gradient.isfinite().all()))

    named = [pair for chunk in chunks for pair in named_in_model(chunk) if pair[1].requires_grad]
    hooks = [parameter.register_hook(look(name)) for name, parameter in named]
    try:
        # The results stay on the device until the end, because reading each one would synchronize with the device.
        yield lambda: next((name for name, is_finite in seen if not is_finite), None)
    finally:
        for hook in hooks:
            hook.remove()


def named_in_model(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters with their names in the whole model, with layers numbered across pipeline stages."""
    layers = {
        name: f"{found[1]}{module.layer_number - 1}"
        for name, module in chunk.named_modules()
        if (found := _LAYER.fullmatch(name)) and isinstance(getattr(module, "layer_number", None), int)
    }
    for name, parameter in chunk.named_parameters():
        within = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        whole = name if within is None else layers[within] + name.removeprefix(within)
        yield re.sub(r"^(module\.)+", "", whole), parameter
