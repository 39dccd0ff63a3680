"""Formats that a checkpoint can be converted to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.schema import PRECISIONS, RunSection
from megatron_ext.config.validate import validate
from megatron_ext.conversion.core import selectron_run
from megatron_ext.conversion.core.family import Family, SavedModel
from megatron_ext.conversion.core.formats import ZERO
from megatron_ext.conversion.core.output_folder import README
from megatron_ext.conversion.core.source import Source
from megatron_ext.conversion.core.tensors import Tensors, convert_dtype
from megatron_ext.conversion.huggingface import folder as hugging_face
from megatron_ext.conversion.huggingface import model_card
from megatron_ext.conversion.huggingface.families import choose_family
from megatron_ext.conversion.huggingface.safetensors_files import assign_shards
from megatron_ext.run_folder.layout import CHECKPOINTS, step_name
from megatron_ext.runs.tokenizer_files import copy_tokenizer
from megatron_ext.utils.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """Options for writing a checkpoint.

    Attributes:
        dtype: dtype to convert floating-point tensors to; None: unchanged.
        shard_bytes: maximum size of a safetensors file.
        name: name of the destination folder.
        architecture: architecture for `--to hf`; None: the first one that supports the model.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    name: str = "run"
    architecture: str | None = None


class Destination(Protocol):
    """Format that a checkpoint can be written in."""

    def includes_training(self, source: Source, options: WriteOptions) -> bool:
        """Return whether the optimizer state is written too, so that training can be resumed."""

    def note(self, source: Source, options: WriteOptions) -> str | None:
        """Return one line about a limitation of the written checkpoint; None if there is none."""

    def check(self, source: Source, options: WriteOptions) -> None:
        """Check that the model can be written in this format.

        Raises:
            UserError: it cannot, with the reason.
        """

    def files(self, source: Source, options: WriteOptions) -> dict[str, int]:
        """Return the files that will contain tensors, with the bytes of these tensors."""

    def write(self, source: Source, options: WriteOptions, folder: Path) -> None:
        """Write the checkpoint into an empty folder.

        Args:
            source: checkpoint to convert.
            options: options for writing.
            folder: existing empty folder.

        Raises:
            OSError: writing fails.
            RuntimeError: writing fails in torch.
        """


class HuggingFace:
    """Folder that `from_pretrained` loads: config.json, safetensors, tokenizer files and README.md."""

    def includes_training(self, source: Source, options: WriteOptions) -> bool:
        """Implement `Destination.includes_training`."""
        return False

    def note(self, source: Source, options: WriteOptions) -> str | None:
        """Implement `Destination.note`."""
        return model_card.loading_note(choose_family(source.saved, options.architecture))

    def check(self, source: Source, options: WriteOptions) -> None:
        """Implement `Destination.check`."""
        choose_family(source.saved, options.architecture)

    def files(self, source: Source, options: WriteOptions) -> dict[str, int]:
        """Implement `Destination.files`."""
        tensors = self._tensors(choose_family(source.saved, options.architecture), source, options)
        return {name: shard.num_bytes for name, shard in assign_shards(tensors.infos(), options.shard_bytes).items()}

    def write(self, source: Source, options: WriteOptions, folder: Path) -> None:
        """Implement `Destination.write`."""
        family = choose_family(source.saved, options.architecture)
        tensors = self._tensors(family, source, options)
        hugging_face.write_folder(family, source.saved, tensors, source.tokenizer, folder, options.shard_bytes)
        _copy_tokenizer(source, folder)
        has_tokenizer, is_plain = source.tokenizer is not None, source.training is not None
        text = model_card.format_card(family, has_tokenizer=has_tokenizer, is_plain=is_plain)
        (folder / README).write_text(text, encoding="utf-8")

    @staticmethod
    def _tensors(family: Family, source: Source, options: WriteOptions) -> Tensors:
        tensors = convert_dtype(source.tensors, options.dtype)
        return hugging_face.family_tensors(family, source.saved, tensors, str(source.path))


class Megatron:
    """Run folder with a checkpoint in Megatron's torch_dist format.

    It contains the optimizer state if the source is a Selectron training run and the dtype is unchanged. Otherwise it
    contains only the model.
    """

    def includes_training(self, source: Source, options: WriteOptions) -> bool:
        """Implement `Destination.includes_training`."""
        return source.training is not None and options.dtype is None

    def note(self, source: Source, options: WriteOptions) -> str | None:
        """Implement `Destination.note`."""
        if not source.has_optimizer or self.includes_training(source, options):
            return None
        reason = "has a format that is not supported" if source.training is None else "does not fit another --dtype"
        return (
            f"the optimizer state {reason} and is not converted: the run can generate text, but training cannot resume"
        )

    def check(self, source: Source, options: WriteOptions) -> None:
        """Implement `Destination.check`."""
        self._precision(source, options)
        validate(RunSection, {"name": options.name}, "run.")  # the run's name is that of the folder

    def files(self, source: Source, options: WriteOptions) -> dict[str, int]:
        """Implement `Destination.files`."""
        step = (source.progress or Progress()).step
        size = convert_dtype(source.tensors, options.dtype).num_bytes
        if source.training is not None and self.includes_training(source, options):
            size = source.training.tensors.num_bytes + source.training.optimizer.tensors.num_bytes
        return {f"{CHECKPOINTS}/{step_name(step)}/__0_0.distcp": size}

    def write(self, source: Source, options: WriteOptions, folder: Path) -> None:
        """Implement `Destination.write`."""
        saved, tensors = _without_padding(source.saved), convert_dtype(source.tensors, options.dtype)
        progress, precision = source.progress or Progress(), self._precision(source, options)
        _copy_tokenizer(source, folder)
        if source.training is not None and self.includes_training(source, options):
            selectron_run.write_training(source.saved, source.training, progress, folder, options.name)
            return
        selectron_run.write_run(saved, tensors, precision, progress, folder, options.name)

    def _precision(self, source: Source, options: WriteOptions) -> str:
        dtype = options.dtype or source.dtype
        names = _precision_names(dtype)
        if not names:
            kind = str(dtype).removeprefix("torch.")
            raise UserError("--dtype", f"{kind} is not a precision of a run", f"give one of {', '.join(PRECISIONS)}")
        return names[0]


class DeepSpeedUniversal:
    """DeepSpeed universal checkpoint. It contains the optimizer state if the source is a Selectron training run."""

    def includes_training(self, source: Source, options: WriteOptions) -> bool:
        """Implement `Destination.includes_training`."""
        return source.training is not None

    def note(self, source: Source, options: WriteOptions) -> str | None:
        """Implement `Destination.note`."""
        if source.training is not None:
            return None
        return "the source has no optimizer state of Selectron: DeepSpeed starts with zero moments at step 0"

    def check(self, source: Source, options: WriteOptions) -> None:
        """Implement `Destination.check`."""
        if options.dtype is not None:
            kind = str(options.dtype).removeprefix("torch.")
            problem = f"{kind} has no effect, because universal checkpoints contain the optimizer's fp32 parameters"
            raise UserError("--dtype", problem, "remove it")

    def files(self, source: Source, options: WriteOptions) -> dict[str, int]:
        """Implement `Destination.files`."""
        from megatron_ext.conversion.deepspeed import universal_writing

        return {f"{universal_writing.checkpoint_tag(source)}/{ZERO}": universal_writing.num_bytes(source)}

    def write(self, source: Source, options: WriteOptions, folder: Path) -> None:
        """Implement `Destination.write`."""
        from megatron_ext.conversion.deepspeed import universal_writing

        _copy_tokenizer(source, folder)
        universal_writing.write_universal(source, (_precision_names(source.dtype) or ["fp32"])[0], folder)


DESTINATIONS: dict[str, Destination] = {
    "hf": HuggingFace(),
    "megatron": Megatron(),
    "deepspeed-universal": DeepSpeedUniversal(),
}
"""Destinations by the value of `--to`."""


def _precision_names(dtype: torch.dtype) -> list[str]:
    """Return the run precisions with this dtype: one name or none."""
    return [name for name, dtype_name in PRECISIONS.items() if str(dtype) == f"torch.{dtype_name}"]


def _copy_tokenizer(source: Source, folder: Path) -> None:
    if source.tokenizer is not None:
        copy_tokenizer(source.tokenizer, folder, plain=source.training is not None)


def _without_padding(saved: SavedModel) -> SavedModel:
    """Return the model with a vocabulary size multiple that requires no padding.

    Padding rows would take part in every softmax without having been trained.
    """
    multiple = gcd(saved.model.vocab_size_multiple, saved.vocab_size)
    return replace(saved, model=replace(saved.model, vocab_size_multiple=multiple))
