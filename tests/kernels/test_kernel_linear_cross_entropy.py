"""Cross entropy of the output layer, chunked and in Triton, compared with torch's on whole logits in float64.

The kernels run on a GPU, or in Triton's interpreter.
"""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton_cases import BF16, DEVICE, FP16, FP32, TOLERANCE, needs_gpu, poison, relative_rms

from kernels.common.dispatch import HAS_TRITON
from kernels.linear_cross_entropy import interface, linear_cross_entropy, op

__all__ = ["poison"]  # imported as a fixture

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
pytestmark = pytest.mark.usefixtures("poison")
FORMS = ["chunked", pytest.param("triton", marks=needs_triton)]


def draw(tokens: int, vocabulary: int, width: int = 24, dtype: torch.dtype = FP32) -> tuple[Tensor, ...]:
    """Draw hidden states, weight, labels, and a mask that counts about four fifths of the losses."""
    gen = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=gen)
    weight = torch.randn(vocabulary, width, generator=gen) / width**0.5
    labels = torch.randint(vocabulary, (tokens,), generator=gen)
    counted = torch.rand(tokens, generator=gen) > 0.2
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE), counted.to(DEVICE)


def expected_of(tensors: tuple[Tensor, ...], factor: float) -> tuple[Tensor, ...]:
    """Compute losses, and gradients of factor times the sum of the counted ones, with torch in float64."""
    hidden, weight, labels, counted = tensors
    inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    losses = F.cross_entropy(inputs[0] @ inputs[1].T, labels, reduction="none")
    return losses.detach(), *torch.autograd.grad(factor * losses[counted].sum(), inputs)


def found_of(tensors: tuple[Tensor, ...], factor: float, **options: object) -> tuple[Tensor, ...]:
    hidden, weight, labels, counted = tensors
    inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
    losses = linear_cross_entropy(*inputs, labels, counted, **options)  # type: ignore[arg-type]
    return losses.detach(), *torch.autograd.grad(factor * (losses * counted).sum(), inputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (1, 7), (63, 100), (130, 4097)])
def test_losses_and_gradients(tokens: int, vocabulary: int, dtype: torch.dtype, form: str) -> None:
    tensors = draw(tokens, vocabulary, dtype=dtype)
    found = found_of(tensors, 0.5, implementation=form, chunk_size=50)
    for actual, target in zip(found, expected_of(tensors, 0.5), strict=True):
        # The rounding error of 16-bit logits is proportional to their magnitude, and so is the error of the losses.
        assert relative_rms(actual, target) < TOLERANCE[dtype] * (1 if dtype == FP32 else 3)
    assert found[0].dtype == FP32
    assert [x.dtype for x in found[1:]] == [dtype, dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000, None])
def test_chunks_of_any_size(chunk_size: int | None, form: str) -> None:
    tensors = draw(64, 33)
    found = found_of(tensors, 1.0, implementation=form, chunk_size=chunk_size)
    for actual, target in zip(found, expected_of(tensors, 1.0), strict=True):
        torch.testing.assert_close(actual.double(), target, rtol=1e-5, atol=1e-6)


def test_float64_is_exact() -> None:
    hidden, weight, labels, counted = draw(40, 50)
    tensors = hidden.double(), weight.double(), labels, counted
    for actual, target in zip(found_of(tensors, 3.0, chunk_size=9), expected_of(tensors, 3.0), strict=True):
        torch.testing.assert_close(actual, target, rtol=1e-13, atol=1e-13)


def test_the_reference_is_torchs() -> None:
    hidden, weight, labels, _ = draw(10, 12)
    losses = linear_cross_entropy(hidden.double(), weight.double(), labels, implementation="reference")
    logits = hidden.double() @ weight.double().T
    torch.testing.assert_close(losses, -logits.log_softmax(1)[torch.arange(10, device=DEVICE), labels])


PADDED = [pytest.param(form, id=form) for form in ("chunked", "reference")]
PADDED.append(pytest.param("triton", marks=needs_triton, id="triton"))


@pytest.mark.parametrize("form", PADDED)
@pytest.mark.parametrize(("rows", "tokens"), [(64, 50), (64, 1), (4097, 4095), (8320, 4096), (30, 30)])
def test_padding_columns_have_no_probability_and_no_gradient(form: str, rows: int, tokens: int) -> None:
    hidden, weight, labels, counted = draw(24, rows)
    weight[tokens:] *= 100  # the padding rows would get most of the probability
    labels %= tokens
    if form == "reference":
        counted[:] = True
    found = found_of((hidden, weight, labels, counted), 0.5, implementation=form, num_columns=tokens, chunk_size=10)
    expected = expected_of((hidden, weight[:tokens], labels, counted), 0.5)
    for actual, target in zip((*found[:2], found[2][:tokens]), expected, strict=True):
        torch.testing.assert_close(actual.double(), target, rtol=1e-5, atol=2e-6)
    assert found[2].shape == weight.shape
    assert (found[2][tokens:] == 0).all()


@pytest.mark.parametrize("form", FORMS)
def test_ranks_with_partial_and_full_padding(form: str) -> None:
    """100 tokens in 160 rows, with 40 rows on each of four ranks.

    The third rank has tokens and padding, the last one only padding.
    """
    rows = interface._rows(form)
    hidden, weight, labels, counted = draw(20, 160)
    labels %= 100
    tensors = (hidden, weight[:100], labels, counted)
    parts = [(first, (hidden @ weight[first : first + 40].T).contiguous()) for first in (0, 40, 80, 120)]
    valid = [40, 40, 20, 0]
    statistics = [rows.statistics(logits, labels, first, n) for (first, logits), n in zip(parts, valid, strict=True)]
    lse, own = op.merge_ranks(torch.stack(statistics))
    expected = expected_of(tensors, 1.0)
    torch.testing.assert_close((lse - own).double(), expected[0], rtol=1e-5, atol=1e-6)
    for (first, logits), n in zip(parts, valid, strict=True):
        rows.differentiate(logits, lse, labels, counted, first, n)
    gradient = torch.cat([logits for _, logits in parts], dim=1)
    assert (gradient[:, 100:] == 0).all()
    torch.testing.assert_close((gradient[:, :100].T @ hidden).double(), expected[2], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("form", FORMS)
def test_large_logits_do_not_overflow(form: str) -> None:
    hidden, weight, labels, counted = draw(20, 30)
    tensors = hidden * 300, weight * 10, labels, counted
    for actual, target in zip(found_of(tensors, 1.0, implementation=form), expected_of(tensors, 1.0), strict=True):
        assert relative_rms(actual, target) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_shapes_and_strides_of_a_batch(form: str) -> None:
    """The model's hidden states are [t, b, h], passed as a view [b, t, h]."""
    hidden, weight, labels, _ = draw(12, 20)
    losses = linear_cross_entropy(hidden.view(6, 2, -1).transpose(0, 1), weight, labels.view(2, 6), implementation=form)
    expected = F.cross_entropy(hidden @ weight.T, labels.view(2, 6).T.flatten(), reduction="none")
    assert losses.shape == (2, 6)
    torch.testing.assert_close(losses.T.flatten(), expected)


@pytest.mark.parametrize("form", FORMS)
def test_nan_in_an_uncounted_loss_is_ignored(form: str) -> None:
    hidden, weight, labels, counted = draw(20, 30)
    hidden[~counted] = float("nan")
    losses, dhidden, _ = found_of((hidden, weight, labels, counted), 1.0, implementation=form)
    assert losses[counted].isfinite().all()
    assert losses[~counted].isnan().all()
    # Uncounted hidden states are multiplied by zero gradients, so they must be finite for the weight's gradient.
    assert (dhidden[~counted] == 0).all()
    hidden[~counted] = 0
    torch.testing.assert_close(dhidden, found_of((hidden, weight, labels, counted), 1.0)[1])


@pytest.mark.parametrize("form", FORMS)
def test_no_gradients_without_grad_mode(form: str) -> None:
    hidden, weight, labels, counted = draw(20, 30)
    with torch.no_grad():
        losses = linear_cross_entropy(hidden.requires_grad_(), weight, labels, counted, implementation=form)
    assert not losses.requires_grad
    torch.testing.assert_close(losses, found_of((hidden, weight, labels, counted), 1.0)[0])


@pytest.mark.parametrize("upstream", ["unlike", "uncounted"])
def test_unequal_gradients_raise(upstream: str) -> None:
    if DEVICE == "cuda":
        pytest.skip("the error is the device's, which no test after it could use")
    hidden, weight, labels, counted = draw(20, 30)
    losses = linear_cross_entropy(hidden.requires_grad_(), weight, labels, counted)
    grad = torch.arange(20.0) * counted if upstream == "unlike" else torch.ones(20)
    with pytest.raises(RuntimeError, match="gradients of the counted losses differ, or an uncounted loss has one"):
        losses.backward(grad)


def test_gradient_without_counted_losses_is_zero() -> None:
    hidden, weight, labels, counted = draw(20, 30)
    for gradient in found_of((hidden, weight, labels, torch.zeros_like(counted)), 1.0)[1:]:
        assert (gradient == 0).all()


def test_nan_gradient_propagates() -> None:
    """The optimizer step detects it, on all ranks."""
    assert all(x.isnan().any() for x in found_of(draw(20, 30), float("nan"))[1:])


def test_auto_logs_its_choice(caplog: pytest.LogCaptureFixture) -> None:
    hidden, weight, labels, _ = draw(4, 5)
    with caplog.at_level(logging.DEBUG, logger="kernels.common.dispatch"):
        linear_cross_entropy(hidden, weight, labels)
    assert ("triton" if DEVICE == "cuda" else "chunked") in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4)}, r"hidden has shape \[4\]: give \[..., features\]"),
        ({"weight_vh": torch.zeros(5, 3)}, r"weight has shape \[5, 3\]: give \[5, 2\]"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels has shape \[3\]: give \[4\]"),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "labels has dtype torch.int32: give torch.int64"),
        ({"counted": torch.ones(4)}, "counted has dtype torch.float32: give torch.bool"),
        ({"weight_vh": torch.zeros(5, 2, dtype=BF16)}, "weight has dtype torch.bfloat16 but hidden has"),
        ({"chunk_size": 0}, "chunk_size is 0: give a whole number of at least 1"),
        ({"num_columns": 6}, "num_columns is 6: give 0 to 5, the rows of weight, or None"),
        ({"num_columns": -1}, "num_columns is -1: give 0 to 5"),
        ({"implementation": "quick"}, "implementation is 'quick', but linear_cross_entropy has"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_arguments_raise(change: dict[str, object], message: str) -> None:
    arguments = {
        "hidden": torch.zeros(4, 2),
        "weight_vh": torch.zeros(5, 2),
        "labels": torch.zeros(4, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**{**arguments, **change})  # type: ignore[arg-type]


@needs_gpu
def test_memory_is_limited_to_a_chunk() -> None:
    hidden, weight, labels, counted = draw(32_768, 32_000, 256, BF16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found_of((hidden, weight, labels, counted), 1.0, chunk_size=1024)
    logits_of_a_chunk = 1024 * 32_000 * 2
    gradients = 2 * (hidden.numel() * 2 + weight.numel() * 2) + weight.numel() * 4
    assert torch.cuda.max_memory_allocated() - before < 2 * logits_of_a_chunk + 1.2 * gradients
