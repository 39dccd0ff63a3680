"""What a checkpoint can be converted to: one class a format, and the table of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Protocol

import torch

from megatron_ext.checkpoint.conversion import hugging_face, selectron_run
from megatron_ext.checkpoint.conversion.families import family_for
from megatron_ext.checkpoint.conversion.family import SavedModel
from megatron_ext.checkpoint.conversion.safetensors_files import shards_of
from megatron_ext.checkpoint.conversion.source import Source
from megatron_ext.checkpoint.conversion.tensors import in_dtype
from megatron_ext.checkpoint.conversion.tokenizer_files import keep_tokenizer
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.schema import RunSection
from megatron_ext.config.validate import validate
from megatron_ext.errors import UserError
from megatron_ext.platform import DTYPES


@dataclass(frozen=True, kw_only=True)
class Wish:
    """How a checkpoint is to be written.

    Attributes:
        dtype: of its numbers; None: as they are.
        shard_bytes: of a safetensors file, at most.
        name: of the destination.
        architecture: of `--to hf`; None: the first that can hold the model.
    """

    dtype: torch.dtype | None = None
    shard_bytes: int = 5 * 10**9
    name: str = "run"
    architecture: str | None = None


class Destination(Protocol):
    """A format that can be written."""

    def check(self, source: Source, wish: Wish) -> None:
        """Whether a model can be written so.

        Raises:
            UserError: it cannot; says why.
        """

    def files(self, source: Source, wish: Wish) -> dict[str, int]:
        """The files with tensors in them, and the bytes of these."""

    def write(self, source: Source, wish: Wish, folder: Path) -> None:
        """Write it into an empty folder.

        Raises:
            OSError: the disk refuses.
            RuntimeError: the same, from torch.
        """


class HuggingFace:
    """config.json, safetensors, tokenizer files, as `from_pretrained` reads them."""

    def check(self, source: Source, wish: Wish) -> None:
        """See `Destination.check`."""
        family_for(source.saved, wish.architecture)

    def files(self, source: Source, wish: Wish) -> dict[str, int]:
        """See `Destination.files`."""
        family = family_for(source.saved, wish.architecture)
        tensors = hugging_face.theirs(family, source.saved, in_dtype(source.tensors, wish.dtype), str(source.path))
        return {name: shard.num_bytes for name, shard in shards_of(tensors.infos(), wish.shard_bytes).items()}

    def write(self, source: Source, wish: Wish, folder: Path) -> None:
        """See `Destination.write`."""
        family = family_for(source.saved, wish.architecture)
        tensors = hugging_face.theirs(family, source.saved, in_dtype(source.tensors, wish.dtype), str(source.path))
        hugging_face.write_folder(family, source.saved, tensors, source.tokenizer, folder, wish.shard_bytes)
        _keep_tokenizer(source, folder)


class Megatron:
    """A run's folder with a checkpoint in Megatron's torch_dist, of the model alone."""

    def check(self, source: Source, wish: Wish) -> None:
        """See `Destination.check`."""
        self._precision(source, wish)
        validate(RunSection, {"name": wish.name}, "run.")  # the folder is called as the run is

    def files(self, source: Source, wish: Wish) -> dict[str, int]:
        """See `Destination.files`."""
        step = (source.progress or Progress()).step
        return {f"checkpoints/step_{step}/__0_0.distcp": in_dtype(source.tensors, wish.dtype).num_bytes}

    def write(self, source: Source, wish: Wish, folder: Path) -> None:
        """See `Destination.write`."""
        saved, tensors = _without_padding(source.saved), in_dtype(source.tensors, wish.dtype)
        progress, precision = source.progress or Progress(), self._precision(source, wish)
        _keep_tokenizer(source, folder)
        selectron_run.write_run(saved, tensors, precision, progress, folder, wish.name)

    def _precision(self, source: Source, wish: Wish) -> str:
        dtype = wish.dtype or source.dtype
        names = [name for name, known in DTYPES.items() if known == dtype]
        if not names:
            kind = str(dtype).removeprefix("torch.")
            raise UserError("--dtype", f"{kind} is no precision of a run", f"give one of {', '.join(DTYPES)}")
        return names[0]


class DeepSpeedUniversal:
    """DeepSpeed's universal checkpoint."""

    def check(self, source: Source, wish: Wish) -> None:
        """See `Destination.check`."""
        raise UserError("--to", "deepspeed-universal cannot be written yet", "give --to hf or --to megatron")

    def files(self, source: Source, wish: Wish) -> dict[str, int]:
        """See `Destination.files`."""
        raise AssertionError("refused by `check`")

    def write(self, source: Source, wish: Wish, folder: Path) -> None:
        """See `Destination.write`."""
        raise AssertionError("refused by `check`")


DESTINATIONS: dict[str, Destination] = {
    "hf": HuggingFace(),
    "megatron": Megatron(),
    "deepspeed-universal": DeepSpeedUniversal(),
}
"""By the name that `--to` takes."""


def _keep_tokenizer(source: Source, folder: Path) -> None:
    if source.tokenizer is not None:
        keep_tokenizer(source.tokenizer.file, folder, source.tokenizer.end)


def _without_padding(saved: SavedModel) -> SavedModel:
    """The model with a vocabulary that needs no padding: rows nobody has trained would take part in every softmax."""
    multiple = gcd(saved.model.vocab_size_multiple, saved.vocab_size)
    return replace(saved, model=replace(saved.model, vocab_size_multiple=multiple))
