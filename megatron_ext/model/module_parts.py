"""Assignment of a model's modules to the parts of a training step that `step_parts` defines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, NamedTuple

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_ext.model.step_parts import EMBEDDING, FEED_FORWARD, LOSS, MIXER, NORMS


class Member(NamedTuple):
    """Module that belongs to a part. A member nested in another member is not part of the outer member's work.

    Attributes:
        module: module whose `forward` does the part's work. Recomputation calls `forward` again in the backward pass.
        part: element of `step_parts.MODEL`.
        layer: layer number in the whole model, from 1; None: outside the layers.
    """

    module: nn.Module
    part: str
    layer: int | None


def part_members(chunks: Iterable[nn.Module]) -> Iterator[Member]:
    """Iterate over the modules of all parts in model chunks, wrapped or not."""
    for chunk in chunks:
        for module in chunk.modules():
            yield from _members(module)


def _members(module: nn.Module) -> Iterator[Member]:
    if isinstance(module, GPTModel):
        yield Member(module, LOSS, None)  # everything but the embedding and the layers
        if module.pre_process:
            yield Member(module.embedding, EMBEDDING, None)
    elif isinstance(module, TransformerBlock):
        yield Member(module, NORMS, None)
    elif isinstance(module, TransformerLayer):
        number = module.layer_number
        yield Member(module, NORMS, number)
        yield Member(module.self_attention, MIXER, number)
        if not isinstance(module.mlp, IdentityOp):
            yield Member(module.mlp, FEED_FORWARD, number)


@contextmanager
def wrap_method(owner: Any, method: str, make_context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Context manager under which one object's method runs inside another context manager.

    Other objects of the class are not affected.

    Args:
        owner: the object.
        method: name of the object's method.
        make_context: function that creates the inner context manager for each call of the method.
    """
    original: Callable[..., Any] = getattr(owner, method)
    has_own_method = method in vars(owner)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return original(*args, **kwargs)

    setattr(owner, method, wrapped)
    try:
        yield
    finally:
        if has_own_method:
            setattr(owner, method, original)
        else:
            delattr(owner, method)
