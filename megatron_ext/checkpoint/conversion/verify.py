"""Showing that what was written is the model that was read: every tensor's bits, and what both models answer."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megatron_ext.checkpoint.conversion import hf_model, hugging_face, plain_model
from megatron_ext.checkpoint.conversion.our_model import logits_of
from megatron_ext.checkpoint.conversion.source import Source
from megatron_ext.checkpoint.conversion.tensors import Tensors, check_shapes, in_dtype
from megatron_ext.errors import UserError

LIMIT = 1e-5
"""Largest difference of two logits, relative to the largest logit or to 1.

The models are computed in fp32 from the numbers that were written, so it is that of fp32's rounding, whatever --dtype.
"""

SEQUENCES, LENGTH = 2, 160
"""Tokens that both are given: more than a chunk of Top-1 Chunk, where the model takes as many."""

MOST_LOGITS = 1 << 25
"""Numbers that a model answers with; where it would be more, there is one sequence. Both models' are held."""

_MEND = "nothing was written; please report it, or leave the check out with --no-verify"


def verify(source: Source, written: Source, dtype: torch.dtype | None, *, with_training: bool = False) -> str:
    """Compare a checkpoint with the one it was made from.

    Args:
        source: what was read.
        written: what was written, read again.
        dtype: type of its numbers; None: those of the source.
        with_training: whether the optimizer's state must be there, too.

    Returns:
        A line that says what was compared.

    Raises:
        UserError: they differ.
    """
    expected = in_dtype(source.tensors, dtype)
    check_shapes(expected.infos(), written.tensors.infos(), str(written.path))
    _compare_bits(expected, written.tensors, str(written.path))
    compared = "every tensor"
    if with_training:
        _compare_training(source, written)
        compared += " and the optimizer's state"
    silent = [one for one in (source, written) if one.family is not None and not hf_model.can_answer(one.family)]
    if silent:
        (family,) = (one.family for one in silent[:1])
        assert family is not None
        return f"verified: {compared}; {family.architecture} runs on a GPU alone, so logits were not compared"
    difference = _difference(source, written, expected)
    if not difference <= LIMIT:
        problem = f"logits differ from those of {source.path} by {difference:.1e}, more than {LIMIT:.0e}"
        raise UserError(str(written.path), problem, _MEND)
    return f"verified: {compared}; logits differ by {difference:.1e} of the largest, at most {LIMIT:.0e}"


def _difference(source: Source, written: Source, expected: Tensors) -> float:
    tokens_bt = fixed_tokens(source)
    theirs_btv = logits(written, written.tensors, tokens_bt)
    ours_btv = logits(source, expected, tokens_bt)
    largest = max(1.0, _largest(ours_btv))
    return _largest(theirs_btv.sub_(ours_btv)) / largest


def _largest(x: Tensor) -> float:
    """Of its absolute numbers, none of which is made; NaN where one of them is."""
    low, high = x.aminmax()
    return abs(float(torch.maximum(-low, high)))


def _compare_training(source: Source, written: Source) -> None:
    """Compare what a run goes on from: tensors with their padding, the optimizer's, its steps, and the data's place."""
    before, after, where = source.training, written.training, str(written.path)
    if before is None or after is None:
        raise UserError(where, "holds no optimizer state", _MEND)
    for one, other in ((before.tensors, after.tensors), (before.optimizer.tensors, after.optimizer.tensors)):
        check_shapes(one.infos(), other.infos(), where)
        _compare_bits(one, other, where)
    said = {
        "the schedule": before.optimizer.schedule == after.optimizer.schedule,
        "the identity": before.identity == after.identity,
        "the progress": source.progress == written.progress,
    }
    for name, is_the_same in said.items():
        if not is_the_same:
            raise UserError(where, f"{name} is not what was to be written", _MEND)


def _compare_bits(expected: Tensors, written: Tensors, where: str) -> None:
    for key in written.infos():  # digests, as the other one is made when this one is held no more
        if _digest(written.read(key)) != _digest(expected.read(key)):
            raise UserError(where, f"{key} is not what was to be written", _MEND)


def _digest(tensor: Tensor) -> bytes:
    """Of a tensor's bytes, which are equal where numbers are not (NaN), and differ where they are equal (0 and -0)."""
    return hashlib.blake2b(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def fixed_tokens(source: Source) -> Tensor:
    """The tokens that a model is asked about, int64 [b, t]: always the same ones."""
    saved = source.saved
    length = min(LENGTH, saved.model.max_position_embeddings or LENGTH)
    generator = torch.Generator().manual_seed(1)
    sequences = SEQUENCES if SEQUENCES * length * saved.vocab_size <= MOST_LOGITS else 1
    return torch.randint(saved.vocab_size, (sequences, length), generator=generator)


def logits(source: Source, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """What a checkpoint's own library answers in fp32, [b, t, v].

    Args:
        source: the checkpoint.
        tensors: its weights in our terms, maybe of another type.
        tokens_bt: int64 [b, t].
    """
    if source.format in ("selectron", "deepspeed_universal"):
        return logits_of(source.saved, tensors, tokens_bt)
    if source.format == "megatron_core":
        return plain_model.logits(source.saved, tensors, tokens_bt)
    assert source.family is not None
    own = hugging_face.theirs(source.family, source.saved, tensors, str(source.path))
    return hf_model.logits(source.path, source.family, own, tokens_bt)
