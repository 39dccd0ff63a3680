"""Interfaces of the model families of other libraries, and the description of a saved model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from megatron_ext.config.schema import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """Model that a checkpoint describes.

    Attributes:
        model: model configuration with derived fields filled in.
        layers: mixer name of each layer.
        mixers: complete configuration of each mixer, by mixer name.
        vocab_size: number of tokens of the tokenizer, before padding.
        seq_length: tokens per training sample.
    """

    model: ModelConfig
    layers: tuple[str, ...]
    mixers: dict[str, Any]
    vocab_size: int
    seq_length: int


@dataclass(frozen=True)
class Rule:
    """Invertible conversion between some tensors of a Selectron checkpoint and some of the other library's checkpoint.

    Attributes:
        ours: keys in the Selectron checkpoint. The tensors are unsharded and without vocabulary padding.
        theirs: keys in the other library's checkpoint.
        to_theirs: function from the tensors of `ours`, in order, to those of `theirs`. It supports every dtype and the
            meta device, and does not change the bits of a value.
        to_ours: inverse of `to_theirs`.
        neutral: keys of `theirs` that correspond to none of our tensors. Their values are fixed and `to_ours` checks
            them.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Callable[[Sequence[Tensor]], list[Tensor]]
    to_ours: Callable[[Sequence[Tensor]], list[Tensor]]
    neutral: tuple[str, ...] = ()


class Family(Protocol):
    """Architecture of a model in another library."""

    architecture: str
    """Name in the `architectures` field of config.json."""

    def unsupported_reason(self, saved: SavedModel) -> str | None:
        """Return the reason why the architecture does not support a Selectron model; None if it does."""

    def config(self, saved: SavedModel) -> dict[str, Any]:
        """Return the config.json of a Selectron model, without the dtype and the token ids."""

    def saved_model(self, config: dict[str, Any]) -> SavedModel:
        """Return the Selectron model that a config.json describes.

        Raises:
            UserError: a field, which the error names, has a value that our models do not support.
        """

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Yield the rules that convert all tensors. Each tensor of either side occurs in exactly one rule."""


@runtime_checkable
class HasModelCode(Protocol):
    """Family whose model code is exported beside the weights, because no installed library contains it."""

    code: Sequence[Path]
    """Python files to copy into the exported folder."""

    def model(self, config: dict[str, Any]) -> Module:
        """Return the fp32 model of a config.json.

        The model is built from this package's files. Files in the checkpoint's folder are not trusted and not executed.
        """

    def rotary_modules(self) -> Sequence[ModuleType]:
        """Return the modules of the model that define `frequencies`, for `in_float64`."""
