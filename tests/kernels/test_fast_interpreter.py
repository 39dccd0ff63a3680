"""The faster functions of Triton's interpreter, compared with those that they replace."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("triton")

import fast_interpreter
from triton import language as tl
from triton.runtime import interpreter


def tensors(shape):
    """Return scores with ties, in fp32, and their indices, in int32."""
    gen = np.random.default_rng(0)
    scores = gen.integers(0, 3, shape).astype(np.float32)
    indices = np.arange(scores.size, dtype=np.int32).reshape(shape)
    block = [(x, tl.block_type(dtype, list(shape))) for x, dtype in ((scores, tl.float32), (indices, tl.int32))]
    return tuple(tl.tensor(interpreter.TensorHandle(x, kind.scalar), kind) for x, kind in block)


def first_best(score, index, other_score, other_index):
    """Combine by NumPy: neither commutative nor in the inputs' dtypes, as it keeps the left of two equal scores."""
    a, b, i, j = (x.handle.data for x in (score, other_score, index, other_index))
    data = np.maximum(a, b).astype(np.float64), np.where(a >= b, i, j).astype(np.int64)
    return tuple(tl.tensor(interpreter.TensorHandle(x, tl.float64), tl.float64) for x in data)


COMBINE = SimpleNamespace(fn=first_best)


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.type == b.type
        assert a.handle.data.dtype == b.handle.data.dtype
        assert np.array_equal(a.handle.data, b.handle.data)


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((4, 8), 0), ((4, 8), 1), ((2, 1, 4), 1)])
def test_reduction(shape, axis, keep_dims):
    operation = interpreter.ReduceOps(axis, COMBINE, keep_dims)
    expected = fast_interpreter.reduce_elements(operation, tensors(shape))
    assert_equal(fast_interpreter.reduce_slices(operation, tensors(shape)), expected)


@pytest.mark.parametrize(("shape", "axis"), [((8,), 0), ((4, 8), 0), ((4, 8), 1)])
def test_scan(shape, axis):
    operation = interpreter.ScanOps(axis, COMBINE, reverse=False)
    expected = fast_interpreter.scan_elements(operation, tensors(shape))
    assert_equal(fast_interpreter.scan_slices(operation, tensors(shape)), expected)


@pytest.mark.parametrize(("source", "target"), [(tl.bfloat16, tl.float32), (tl.float32, tl.bfloat16)])
@pytest.mark.parametrize("subnormal", [False, True])
def test_conversion_of_bfloat16(source, target, subnormal):
    """Every bf16, infinities and NaN included, and fp32 numbers beside them."""
    bits = np.arange(2**16, dtype=np.uint16)
    if not subnormal:
        bits = bits[(bits & 0x7F80 != 0) | (bits & 0x7F == 0)]
    if source == tl.float32:
        low = np.random.default_rng(0).integers(0, 2**16, len(bits), dtype=np.uint32)
        bits = bits.astype(np.uint32) << 16 | low * (bits & 0x7F80 != 0)
    x = np.stack([bits, bits[::-1]]).T
    found = fast_interpreter.convert_bfloat16(x, source, target, None)
    expected = fast_interpreter.convert_float(x, source, target, None)
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)
