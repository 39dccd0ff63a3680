"""Which gradient of a rank is the first that is not finite, before ranks add theirs up: then it is on all of them.

Looking costs a pass over every gradient, so it is done in a step that is computed again because its gradient's norm was
not finite, and in no other. It is autograd that is asked, so it is alike under every optimizer: Megatron's and
DeepSpeed's reduce gradients, and give them away (ZeRO-2 and ZeRO-3 in the backward pass), only after autograd has made
them.

What it cannot tell: the ranks of one model-parallel group hand gradients on to each other in the backward pass, so all
of them may have one that is not finite. And a sum may be infinite of which every part is finite: then no rank has any.
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
    """Within it the gradients of model chunks are looked at as the backward pass makes them.

    Args:
        chunks: of this rank, wrapped or not.

    Yields:
        What gives, after the backward pass, the parameter whose gradient was the first that was not finite; None: all
        were.
    """
    seen: list[tuple[str, Tensor]] = []

    def look(name: str) -> Callable[[Tensor], None]:
        return lambda gradient: seen.append((name, gradient.isfinite().all()))

    named = [pair for chunk in chunks for pair in named_in_model(chunk) if pair[1].requires_grad]
    hooks = [parameter.register_hook(look(name)) for name, parameter in named]
    try:
        # The answers stay on the device until all are there: one by one, each would have it wait.
        yield lambda: next((name for name, is_finite in seen if not is_finite), None)
    finally:
        for hook in hooks:
            hook.remove()


def named_in_model(chunk: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by their names in the whole model, in which layers of later pipeline stages have higher numbers."""
    layers = {
        name: f"{found[1]}{module.layer_number - 1}"
        for name, module in chunk.named_modules()
        if (found := _LAYER.fullmatch(name)) and isinstance(getattr(module, "layer_number", None), int)
    }
    for name, parameter in chunk.named_parameters():
        within = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        whole = name if within is None else layers[within] + name.removeprefix(within)
        yield re.sub(r"^(module\.)+", "", whole), parameter
