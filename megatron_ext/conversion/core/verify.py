"""Verification of a conversion: every tensor is compared bit by bit, and the logits of both models are compared."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from megatron_ext.conversion.core.our_model import compute_logits
from megatron_ext.conversion.core.source import Source
from megatron_ext.conversion.core.tensors import Tensors, check_shapes, convert_dtype
from megatron_ext.conversion.core.tolerance import LIMIT, SHORT_LENGTH, comparison_lengths
from megatron_ext.conversion.huggingface import folder
from megatron_ext.conversion.huggingface import model as hf_model
from megatron_ext.conversion.megatron import gpt_model
from megatron_ext.utils.errors import UserError

SEQUENCES = 2
"""Number of sequences at the short length. At the long length there is one."""

MAX_LOGITS = 1 << 25
"""Maximum number of logits per model for which two sequences are compared.

Beyond it, one sequence is compared. The logits of both models are in memory at the same time.
"""

_HINT = "nothing was written; please report it, or skip the check with --no-verify"


def verify(source: Source, written: Source, dtype: torch.dtype | None, *, compare_optimizer: bool = False) -> str:
    """Compare a written checkpoint with its source.

    Args:
        source: checkpoint that was read.
        written: checkpoint that was written, opened again.
        dtype: dtype that the tensors were converted to; None: unchanged.
        compare_optimizer: whether to compare the optimizer state too.

    Returns:
        One line that describes what was compared.

    Raises:
        UserError: the checkpoints differ.
    """
    expected = convert_dtype(source.tensors, dtype)
    check_shapes(expected.infos(), written.tensors.infos(), str(written.path))
    _compare_bits(expected, written.tensors, str(written.path))
    compared = "every tensor"
    if compare_optimizer:
        _compare_training(source, written)
        compared += " and the optimizer state"
    for family in (source.family, written.family):
        if family is not None and not hf_model.runs_on_cpu(family):
            return f"verified: {compared}; {family.architecture} runs only on a GPU, so logits were not compared"
    parameters = sum(info.num_elements for info in expected.infos().values())
    differences = [_compare_logits(source, written, expected, t) for t in comparison_lengths(source.saved, parameters)]
    return f"verified: {compared}; logits differ by {', '.join(differences)}; at most {LIMIT:.0e}"


def _compare_logits(source: Source, written: Source, expected: Tensors, length: int) -> str:
    """Compare the logits of both models and return a description of the largest difference.

    Raises:
        UserError: the difference exceeds `LIMIT`.
    """
    tokens_bt = fixed_tokens(source, length)
    theirs_btv = logits(written, written.tensors, tokens_bt)
    ours_btv = logits(source, expected, tokens_bt)
    scale = max(1.0, _max_abs(ours_btv))
    difference = _max_abs(theirs_btv.sub_(ours_btv)) / scale
    if not difference <= LIMIT:
        problem = f"logits differ from those of {source.path} by {difference:.1e} at {length} tokens"
        raise UserError(str(written.path), f"{problem}, more than {LIMIT:.0e}", _HINT)
    return f"{difference:.1e} of the largest at {length} tokens"


def _max_abs(x: Tensor) -> float:
    """Return the largest absolute value without a temporary copy, or NaN if x contains one."""
    low, high = x.aminmax()
    return abs(float(torch.maximum(-low, high)))


def _compare_training(source: Source, written: Source) -> None:
    """Compare the training state: tensors with padding, optimizer state, schedule, identity and progress."""
    expected, found, where = source.training, written.training, str(written.path)
    if expected is None or found is None:
        raise UserError(where, "contains no optimizer state", _HINT)
    for first, second in ((expected.tensors, found.tensors), (expected.optimizer.tensors, found.optimizer.tensors)):
        check_shapes(first.infos(), second.infos(), where)
        _compare_bits(first, second, where)
    comparisons = {
        "the schedule": expected.optimizer.schedule == found.optimizer.schedule,
        "the identity": expected.identity == found.identity,
        "the progress": source.progress == written.progress,
    }
    for name, is_equal in comparisons.items():
        if not is_equal:
            raise UserError(where, f"{name} differs from the source's", _HINT)


def _compare_bits(expected: Tensors, written: Tensors, where: str) -> None:
    for key in written.infos():  # digests, so that only one of the two tensors is in memory
        if _digest(written.read(key)) != _digest(expected.read(key)):
            raise UserError(where, f"{key} differs from the converted tensor", _HINT)


def _digest(tensor: Tensor) -> bytes:
    """Return a digest of a tensor's bytes.

    A comparison of values would treat equal NaNs as different, and 0 and -0 as equal.
    """
    return hashlib.blake2b(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).digest()


def fixed_tokens(source: Source, length: int) -> Tensor:
    """Return the tokens that models are compared on, int64 [b, t].

    They depend only on the vocabulary size and the length.
    """
    vocabulary = source.saved.vocab_size
    generator = torch.Generator().manual_seed(1)
    is_small = length <= SHORT_LENGTH and SEQUENCES * length * vocabulary <= MAX_LOGITS
    return torch.randint(vocabulary, (SEQUENCES if is_small else 1, length), generator=generator)


def logits(source: Source, tensors: Tensors, tokens_bt: Tensor) -> Tensor:
    """Compute a checkpoint's logits in float64 with the library of its format, [b, k, v] for the last k tokens.

    Args:
        source: the checkpoint.
        tensors: its weights as our tensors, possibly in another dtype.
        tokens_bt: int64 [b, t].
    """
    if source.format in ("selectron", "deepspeed_universal"):
        return compute_logits(source.saved, tensors, tokens_bt)
    if source.format == "megatron_core":
        return gpt_model.logits(source.saved, tensors, tokens_bt)
    assert source.family is not None
    weights = folder.family_tensors(source.family, source.saved, tensors, str(source.path))
    return hf_model.logits(source.path, source.family, weights, tokens_bt)
