"""What there is to convert: any checkpoint that can be read, as a model of ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.checkpoint.conversion.family import Family, SavedModel
from megatron_ext.checkpoint.conversion.tensors import TensorInfo, Tensors
from megatron_ext.checkpoint.conversion.tokenizer_files import KeptTokenizer
from megatron_ext.checkpoint.folder import Progress

if TYPE_CHECKING:
    import torch

    from megatron_ext.checkpoint.conversion.torch_dist import OptimizerState

Format = Literal["selectron", "hugging_face", "megatron_core", "deepspeed_universal"]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """What a user says of a checkpoint that does not say it itself.

    Attributes:
        model_config: YAML file with our `model` section, and maybe `mixers` and `data.seq_length`.
        tokenizer: a tokenizer.json.
    """

    model_config: Path | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """What a run of ours needs to go on exactly, beside its progress.

    Attributes:
        tensors: the model's, with the padding of the vocabulary: its rows take part in every softmax and are trained.
        optimizer: its state, for tensors of the same shapes.
        identity: the record's: what a run that goes on must share.
        config: the run's configuration, plain values; None: not there.
    """

    tensors: Tensors
    optimizer: OptimizerState
    identity: dict[str, Any]
    config: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint.

    Attributes:
        path: the folder with its tensors.
        format: who wrote it.
        saved: the model, in our terms.
        stored: its tensors as they lie there.
        tensors: the same as ours, without vocabulary padding.
        tokenizer: its tokenizer, where it has one.
        progress: how far its training was; None: it does not say.
        has_optimizer: whether the optimizer's state is there, in whatever form.
        training: the state of a training that can go on; None: of another library, or not there.
        family: of its architecture; None: not of another library.
    """

    path: Path
    format: Format
    saved: SavedModel
    stored: Tensors
    tensors: Tensors
    tokenizer: KeptTokenizer | None = None
    progress: Progress | None = None
    has_optimizer: bool = False
    training: Training | None = None
    family: Family | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The type of most of its numbers."""
        return main_dtype(self.tensors.infos().values())


def main_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """The floating-point type that most of the numbers have."""
    counts: Counter[torch.dtype] = Counter()
    for info in infos:
        if info.dtype.is_floating_point:
            counts[info.dtype] += info.num_elements
    return counts.most_common(1)[0][0]
