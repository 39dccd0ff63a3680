"""What a checkpoint can be converted to: one class a format, and the table of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megatron_ext.checkpoint.conversion import hugging_face, model_card, selectron_run
from megatron_ext.checkpoint.conversion.families import family_for
from megatron_ext.checkpoint.conversion.family import SavedModel
from megatron_ext.checkpoint.conversion.forms import ZERO
from megatron_ext.checkpoint.conversion.placing import README
from megatron_ext.checkpoint.conversion.safetensors_files import shards_of
from megatron_ext.checkpoint.conversion.source import Source
from megatron_ext.checkpoint.conversion.tensors import in_dtype
from megatron_ext.checkpoint.conversion.tokenizer_files import copy_tokenizer
from megatron_ext.checkpoint.folder import Progress
from megatron_ext.config.schema import PRECISIONS, RunSection
from megatron_ext.config.validate import validate
from megatron_ext.errors import UserError

if TYPE_CHECKING:
    import torch


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

    def carries_training(self, source: Source, wish: Wish) -> bool:
        """Whether the optimizer's state is written, too, and a training can go on."""

    def remark(self, source: Source, wish: Wish) -> str | None:
        """What a user may not expect of what is written; one line."""

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

    def carries_training(self, source: Source, wish: Wish) -> bool:
        """See `Destination.carries_training`."""
        return False

    def remark(self, source: Source, wish: Wish) -> str | None:
        """See `Destination.remark`."""
        return model_card.needs(family_for(source.saved, wish.architecture))

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
        _copy_tokenizer(source, folder)
        is_there, plain = source.tokenizer is not None, source.training is not None
        text = model_card.card(family, with_tokenizer=is_there, plain=plain)
        (folder / README).write_text(text, encoding="utf-8")


class Megatron:
    """A run's folder with a checkpoint in Megatron's torch_dist.

    With the state of its optimizer where the source is a training of ours and keeps its types; else of the model alone.
    """

    def carries_training(self, source: Source, wish: Wish) -> bool:
        """See `Destination.carries_training`."""
        return source.training is not None and wish.dtype is None

    def remark(self, source: Source, wish: Wish) -> str | None:
        """See `Destination.remark`."""
        if not source.has_optimizer or self.carries_training(source, wish):
            return None
        reason = "is of another library's form" if source.training is None else "belongs to a run of the types it has"
        return f"the optimizer's state {reason}, and is left out: the run can generate text, and not be continued"

    def check(self, source: Source, wish: Wish) -> None:
        """See `Destination.check`."""
        self._precision(source, wish)
        validate(RunSection, {"name": wish.name}, "run.")  # the folder is called as the run is

    def files(self, source: Source, wish: Wish) -> dict[str, int]:
        """See `Destination.files`."""
        step = (source.progress or Progress()).step
        size = in_dtype(source.tensors, wish.dtype).num_bytes
        if source.training is not None and self.carries_training(source, wish):
            size = source.training.tensors.num_bytes + source.training.optimizer.tensors.num_bytes
        return {f"checkpoints/step_{step}/__0_0.distcp": size}

    def write(self, source: Source, wish: Wish, folder: Path) -> None:
        """See `Destination.write`."""
        saved, tensors = _without_padding(source.saved), in_dtype(source.tensors, wish.dtype)
        progress, precision = source.progress or Progress(), self._precision(source, wish)
        _copy_tokenizer(source, folder)
        if source.training is not None and self.carries_training(source, wish):
            selectron_run.write_training(source.saved, source.training, progress, folder, wish.name)
            return
        selectron_run.write_run(saved, tensors, precision, progress, folder, wish.name)

    def _precision(self, source: Source, wish: Wish) -> str:
        dtype = wish.dtype or source.dtype
        names = _precisions(dtype)
        if not names:
            kind = str(dtype).removeprefix("torch.")
            raise UserError("--dtype", f"{kind} is no precision of a run", f"give one of {', '.join(PRECISIONS)}")
        return names[0]


class DeepSpeedUniversal:
    """DeepSpeed's universal checkpoint, with the state of its optimizer where the source is a training of ours."""

    def carries_training(self, source: Source, wish: Wish) -> bool:
        """See `Destination.carries_training`."""
        return source.training is not None

    def remark(self, source: Source, wish: Wish) -> str | None:
        """See `Destination.remark`."""
        if source.training is not None:
            return None
        return "no optimizer state of ours is there: DeepSpeed finds moments of zero after 0 steps, as Adam begins"

    def check(self, source: Source, wish: Wish) -> None:
        """See `Destination.check`."""
        if wish.dtype is not None:
            kind = str(wish.dtype).removeprefix("torch.")
            problem = f"{kind} is for the numbers of a model, and a universal checkpoint holds the optimizer's, in fp32"
            raise UserError("--dtype", problem, "leave it out")

    def files(self, source: Source, wish: Wish) -> dict[str, int]:
        """See `Destination.files`."""
        from megatron_ext.checkpoint.conversion import universal_writing

        return {f"{universal_writing.tag_of(source)}/{ZERO}": universal_writing.num_bytes(source)}

    def write(self, source: Source, wish: Wish, folder: Path) -> None:
        """See `Destination.write`."""
        from megatron_ext.checkpoint.conversion import universal_writing

        _copy_tokenizer(source, folder)
        universal_writing.write_universal(source, (_precisions(source.dtype) or ["fp32"])[0], folder)


DESTINATIONS: dict[str, Destination] = {
    "hf": HuggingFace(),
    "megatron": Megatron(),
    "deepspeed-universal": DeepSpeedUniversal(),
}
"""By the name that `--to` takes."""


def _precisions(dtype: torch.dtype) -> list[str]:
    """Names of a type as that of a run; none, or one."""
    return [name for name, known in PRECISIONS.items() if str(dtype) == f"torch.{known}"]


def _copy_tokenizer(source: Source, folder: Path) -> None:
    if source.tokenizer is not None:
        copy_tokenizer(source.tokenizer, folder, plain=source.training is not None)


def _without_padding(saved: SavedModel) -> SavedModel:
    """The model with a vocabulary that needs no padding: rows nobody has trained would take part in every softmax."""
    multiple = gcd(saved.model.vocab_size_multiple, saved.vocab_size)
    return replace(saved, model=replace(saved.model, vocab_size_multiple=multiple))
