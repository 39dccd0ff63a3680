"""What a model family of another library must say so that checkpoints go there and back, a few tensors at a time."""

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
    """A model as its checkpoint describes it.

    Attributes:
        model: sizes, derived fields filled in.
        layers: the mixer's name for each layer.
        mixers: by mixer name, that mixer's own configuration, whole.
        vocab_size: tokens of the tokenizer, before padding.
        seq_length: tokens a sample of training.
    """

    model: ModelConfig
    layers: tuple[str, ...]
    mixers: dict[str, Any]
    vocab_size: int
    seq_length: int


@dataclass(frozen=True)
class Rule:
    """A few tensors of ours and a few of theirs that are made from each other alone.

    Attributes:
        ours: keys in our checkpoint; the tensors are whole, without vocabulary padding.
        theirs: keys in theirs.
        to_theirs: from the tensors of `ours`, in order, to those of `theirs`, in any dtype, bits unchanged.
        to_ours: the inverse.
        neutral: those of `theirs` that stand for nothing of ours and have fixed values, see `to_ours`.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    to_theirs: Callable[[Sequence[Tensor]], list[Tensor]]
    to_ours: Callable[[Sequence[Tensor]], list[Tensor]]
    neutral: tuple[str, ...] = ()


class Family(Protocol):
    """One architecture of another library."""

    architecture: str
    """As in `architectures` of its config.json."""

    def why_not(self, saved: SavedModel) -> str | None:
        """What of a model of ours the architecture cannot express; None: it can hold the model."""

    def config(self, saved: SavedModel) -> dict[str, Any]:
        """The architecture's config.json of a model of ours, without its dtype and its tokens' numbers."""

    def saved_model(self, config: dict[str, Any]) -> SavedModel:
        """The model of ours that is the one of a config.json.

        Raises:
            UserError: it has something that ours cannot express; names the field of config.json.
        """

    def rules(self, saved: SavedModel) -> Iterator[Rule]:
        """Rules that together name every tensor of both sides once."""


@runtime_checkable
class ShipsCode(Protocol):
    """A family whose model is none of an installed library's: its Python files lie beside the weights."""

    code: Sequence[Path]
    """The files, as the folder is to hold them."""

    def model(self, config: dict[str, Any]) -> Module:
        """The model of a config.json, fp32, made by the files here: those of a folder may be anybody's."""

    def rotating(self) -> Sequence[ModuleType]:
        """Modules of that model with a function `frequencies`, see `in_float64`."""
