"""Description of an opened checkpoint of any format as a Selectron model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.conversion.core.family import Family, SavedModel
from megatron_ext.conversion.core.tensors import TensorInfo, Tensors
from megatron_ext.runs.tokenizer_files import StoredTokenizer

if TYPE_CHECKING:
    import torch

    from megatron_ext.conversion.megatron.torch_dist import OptimizerState

Format = Literal["selectron", "hugging_face", "megatron_core", "deepspeed_universal"]


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Information from the user that a checkpoint may lack.

    Attributes:
        model_config: YAML file with our `model` section, and optionally `mixers` and `data.seq_length`.
        tokenizer: a tokenizer.json.
    """

    model_config: Path | None = None
    tokenizer: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training state of a Selectron run, from which it can be resumed.

    Attributes:
        tensors: tensors of the model with vocabulary padding. The padding rows are trained, because they are part of
            every softmax.
        optimizer: optimizer state, for tensors of the same shapes.
        identity: identity in the checkpoint's record, which a resumed run must share.
        config: configuration of the run as plain values; None: not available.
    """

    tensors: Tensors
    optimizer: OptimizerState
    identity: dict[str, Any]
    config: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Source:
    """Opened checkpoint.

    Attributes:
        path: folder with the tensors.
        format: format of the checkpoint.
        saved: our model that the checkpoint describes.
        stored: tensors as they are stored.
        tensors: tensors converted to ours, without vocabulary padding.
        tokenizer: tokenizer beside the model; None: no tokenizer.
        progress: progress of the training; None: unknown.
        has_optimizer: True if the checkpoint contains optimizer state, in any form.
        training: state to resume a Selectron run from; None: not available, or from another library.
        family: family of the model's architecture; None: the format is not Hugging Face.
    """

    path: Path
    format: Format
    saved: SavedModel
    stored: Tensors
    tensors: Tensors
    tokenizer: StoredTokenizer | None = None
    progress: Progress | None = None
    has_optimizer: bool = False
    training: Training | None = None
    family: Family | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point dtype of most elements."""
        return main_dtype(self.tensors.infos().values())


def main_dtype(infos: Iterable[TensorInfo]) -> torch.dtype:
    """Return the floating-point dtype of most elements."""
    counts: Counter[torch.dtype] = Counter()
    for info in infos:
        if info.dtype.is_floating_point:
            counts[info.dtype] += info.num_elements
    return counts.most_common(1)[0][0]
