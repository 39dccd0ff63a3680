"""Native Sparse Attention, compared with loops written from its definition, as a whole and branch by branch."""

import math

import numpy as np
import pytest
import torch

from kernels.native_sparse_attention import native_sparse_attention
from kernels.native_sparse_attention.reference import compressed_probabilities, select_blocks
from kernels.softmax_attention import softmax_attention

COMPRESSED, SELECTED, WINDOW = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def softmax(scores):
    highest = max(scores, default=0.0)
    weights = [math.exp(s - highest) for s in scores]
    return [w / sum(weights) for w in weights]


def attend(q, keys, values, scale):
    weights = softmax([scale * float(q @ key) for key in keys])
    return sum(w * value for w, value in zip(weights, values, strict=True))


def brute_force(q, k, v, gates, size, num_selected, window, scale=None, offset=0):
    """Compute the output by query and head in float64. Also return the selected blocks as sets."""
    q, k, v, gates = (x.detach().double() for x in (q, k, v, gates))
    batch, length, heads, d = q.shape
    group = heads // k.shape[2]
    scale = d**-0.5 if scale is None else scale
    out = torch.zeros(batch, length, heads, v.shape[3], dtype=torch.float64)
    taken = {}
    for b, i, kv in np.ndindex(batch, length, k.shape[2]):
        t, keys, values = offset + i, k[b, :, kv], v[b, :, kv]
        of_group = range(kv * group, (kv + 1) * group)
        mean_keys, mean_values = (whole_block_means(x[: t + 1], size) for x in (keys, values))
        weights = [softmax([scale * float(q[b, i, h] @ key) for key in mean_keys]) for h in of_group]
        blocks = taken[b, kv, i] = most_important(weights, t // size, num_selected)
        chosen = [s for s in range(t + 1) if s // size in blocks]
        recent = list(range(max(0, t - window + 1), t + 1))
        for h in of_group:
            if mean_keys:
                out[b, i, h] += gates[b, i, h, 0] * attend(q[b, i, h], mean_keys, mean_values, scale)
            out[b, i, h] += gates[b, i, h, 1] * attend(q[b, i, h], keys[chosen], values[chosen], scale)
            out[b, i, h] += gates[b, i, h, 2] * attend(q[b, i, h], keys[recent], values[recent], scale)
    return out, taken


def whole_block_means(rows, size):
    return [sum(rows[c * size + j] for j in range(size)) / size for c in range(len(rows) // size)]


def most_important(weights, own, num_selected):
    blocks = {0, max(own - 1, 0), own}
    importance = [sum(of_head) for of_head in zip(*weights, strict=True)]
    for c in sorted(range(len(importance)), key=lambda c: (-importance[c], c)):
        if len(blocks) < num_selected:
            blocks.add(c)
    return blocks


def inputs(tq=13, tk=13, hq=4, hkv=2, d=4, dv=3, dtype=torch.float64, batch=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = (batch, tq, hq, d), (batch, tk, hkv, d), (batch, tk, hkv, dv)
    q, k, v = (torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes)
    return q, k, v, torch.rand(batch, tq, hq, 3, generator=gen, dtype=torch.float64).to(dtype)


def fixed_gates(q, gates):
    return torch.tensor(gates, dtype=q.dtype).expand(*q.shape[:3], 3)


@pytest.mark.parametrize(
    ("length", "size", "num_selected", "window"),
    [
        (17, 4, 3, 3),  # a partial last block, and no selection beyond the own block, the previous one and block 0
        (13, 4, 1, 1),
        (21, 4, 4, 40),  # window longer than the sequence
        (24, 4, 4, 5),
        (11, 1, 5, 4),
        (9, 3, 16, 2),  # more blocks selected than exist
        (3, 4, 2, 2),  # no complete block
    ],
)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_matches_the_definition(length, size, num_selected, window, heads):
    q, k, v, gates = inputs(tq=length, tk=length, hq=heads[0], hkv=heads[1])
    out = native_sparse_attention(q, k, v, gates, block_size=size, num_selected=num_selected, window=window)
    expected, _ = brute_force(q, k, v, gates, size, num_selected, window)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("offset", [0, 5, 12])
def test_query_offset(offset):
    q, k, v, gates = inputs(tq=7, tk=19)
    options = {"num_selected": 4, "window": 6, "scale": 0.8}
    out = native_sparse_attention(q, k, v, gates, block_size=4, query_offset=offset, **options)
    expected, _ = brute_force(q, k, v, gates, 4, offset=offset, **options)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


def select(q, k, num_selected, size=4, offset=0):
    means = k[:, : k.shape[1] // size * size].unflatten(1, (-1, size)).mean(2)
    probabilities = compressed_probabilities(q, means, block_size=size, scale=1.0, query_offset=offset)
    return select_blocks(probabilities, q, k, block_size=size, num_selected=num_selected, query_offset=offset)


@pytest.mark.parametrize("hkv", [2, 1])
def test_ties_go_to_the_lowest_block(hkv):
    # Every complete block repeats one of two blocks of integers, so equal scores are bit-identical.
    q, k, v, gates = inputs(tq=30, tk=30, hq=2, hkv=hkv)
    kinds = torch.randint(-2, 3, (2, 2, 4, hkv, 4), generator=torch.Generator().manual_seed(1)).double()
    k = kinds[:, [0, 1, 0, 1, 1, 0, 0, 1]].flatten(1, 2)[:, :30]
    q = (2 * q).round()
    taken = select(q, k, 4)
    _, expected = brute_force(q, k, v, gates, 4, 4, 1, scale=1.0)
    for (b, kv, i), blocks in expected.items():
        assert set(taken[b, kv, i].nonzero().flatten().tolist()) == blocks


def test_equal_blocks_are_selected_in_order():
    ones = torch.ones(1, 22, 1, 3)
    taken = select(ones, ones, 4)[0, 0]
    rows = {t: taken[t].nonzero().flatten().tolist() for t in (0, 3, 4, 8, 15, 21)}
    assert rows == {0: [0], 3: [0], 4: [0, 1], 8: [0, 1, 2], 15: [0, 1, 2, 3], 21: [0, 1, 4, 5]}
    # Fewer than the three blocks that are always selected.
    assert torch.equal(select(ones, ones, 1), select(ones, ones, 3))


def test_heads_of_a_group_share_their_selection():
    # The heads prefer different blocks, 1 and 2. The summed probabilities follow the head with the larger margin.
    k = torch.zeros(1, 5, 1, 2, dtype=torch.float64)
    k[0, 1, 0, 0] = k[0, 2, 0, 1] = 1.0
    q = torch.tensor([[1.0, 0.0], [0.0, 5.0]], dtype=torch.float64).expand(1, 5, 2, 2)
    together = select(q, k, 4, size=1)[0, 0, 4].tolist()
    assert together == [True, False, True, True, True]
    assert select(q[:, :, :1], k, 4, size=1)[0, 0, 4].tolist() == [True, True, False, True, True]


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize(
    ("gates", "options"),
    [
        (COMPRESSED, {"block_size": 1}),
        (SELECTED, {"block_size": 4, "num_selected": 5}),
        (SELECTED, {"block_size": 32, "num_selected": 1}),
        (WINDOW, {"window": 18}),
        (WINDOW, {"window": 1000}),
    ],
)
def test_branch_over_all_keys_is_softmax_attention(gates, options, heads):
    q, k, v, _ = inputs(tq=18, tk=18, hq=heads[0], hkv=heads[1])
    out = native_sparse_attention(q, k, v, fixed_gates(q, gates), **options)
    torch.testing.assert_close(out, softmax_attention(q, k, v), rtol=1e-12, atol=1e-13)


def test_the_window_branch_is_windowed_attention():
    q, k, v, _ = inputs(tq=9, tk=18)
    out = native_sparse_attention(q, k, v, fixed_gates(q, WINDOW), window=5, query_offset=9)
    torch.testing.assert_close(out, softmax_attention(q, k, v, window=5, query_offset=9), rtol=1e-12, atol=1e-13)


def test_query_without_a_complete_block_has_no_compressed_output():
    q, k, v, _ = (x.requires_grad_() for x in inputs())
    out = native_sparse_attention(q, k, v, fixed_gates(q, COMPRESSED), block_size=4)
    assert torch.equal(out[:, :3], torch.zeros_like(out[:, :3]))
    assert bool((out[:, 3:] != 0).all())
    with torch.autograd.set_detect_anomaly(True):  # no NaN in intermediate gradients either
        (grad_q,) = torch.autograd.grad(out.sum(), q)
    assert torch.equal(grad_q[:, :3], torch.zeros_like(grad_q[:, :3]))
    assert bool(grad_q.isfinite().all())


@pytest.mark.parametrize(("length", "size"), [(11, 3), (4, 8)])
def test_gradient_by_finite_differences(length, size):
    # gradcheck perturbs inputs by 1e-6. Random importances differ by much more, so the selection is unchanged.
    arguments = [x.requires_grad_() for x in inputs(tq=length - 2, tk=length, hq=2, hkv=1, d=3, dv=2, batch=1)]

    def op(q, k, v, gates):
        return native_sparse_attention(q, k, v, gates, block_size=size, num_selected=4, window=4, query_offset=2)

    assert torch.autograd.gradcheck(op, arguments)


def test_selection_has_no_gradient():
    q, k, v, _ = (x.requires_grad_() for x in inputs(tq=20, tk=20))
    out = native_sparse_attention(q, k, v, fixed_gates(q, SELECTED), block_size=4, num_selected=4)
    _, blocks = brute_force(q, k, v, fixed_gates(q, SELECTED), 4, 4, 1)
    visible = torch.tensor(
        [[[[s <= t and s // 4 in blocks[b, h // 2, t] for s in range(20)] for t in range(20)] for h in range(4)]
         for b in range(2)]
    )  # fmt: skip
    plain = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
    expected = torch.nn.functional.scaled_dot_product_attention(*plain, attn_mask=visible).transpose(1, 2)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for grad, expected_grad in zip(found, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_close(dtype):
    arguments = inputs(dtype=dtype)
    out = native_sparse_attention(*arguments, block_size=4, num_selected=4, window=5)
    assert out.dtype == dtype
    # The reference receives the same rounded inputs, so only the output's rounding remains.
    expected = native_sparse_attention(*(x.double() for x in arguments), block_size=4, num_selected=4, window=5)
    tolerance = 2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_gates_of_higher_precision():
    q, k, v, gates = inputs(dtype=torch.bfloat16)
    out = native_sparse_attention(q, k, v, gates.float(), block_size=4)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, native_sparse_attention(q, k, v, gates, block_size=4), rtol=0, atol=0)


def test_autocast_does_not_change_the_result():
    arguments = inputs(dtype=torch.float32)
    expected = native_sparse_attention(*arguments, block_size=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(native_sparse_attention(*arguments, block_size=4), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size is 0: give a whole number"),
        ({"num_selected": 0}, "num_selected is 0: give a whole number"),
        ({"window": 2.5}, "window is 2.5: give a whole number"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"query_offset": 3}, "query_offset is 3"),
        ({"implementation": "flex"}, "implementation is 'flex', but native_sparse_attention has"),
        ({"gates": torch.rand(2, 13, 4, 2)}, r"gates has shape \[2, 13, 4, 2\]: give \[2, 13, 4, 3\]"),
        ({"gates": torch.rand(2, 13, 2, 3)}, r"gates has shape \[2, 13, 2, 3\]: give \[2, 13, 4, 3\]"),
        ({"gates": torch.ones(2, 13, 4, 3, dtype=torch.int64)}, "gates has dtype torch.int64"),
        ({"q": torch.rand(2, 13, 3, 4, dtype=torch.float64)}, "q has 3 heads: give a multiple of the 2"),
        ({"k": torch.rand(2, 13, 2, 5, dtype=torch.float64)}, "k has shape"),
        ({"v": torch.rand(2, 12, 2, 3, dtype=torch.float64)}, "v has shape"),
        ({"v": torch.rand(2, 13, 2, 3)}, "v has dtype torch.float32 but q has torch.float64"),
    ],
)
def test_invalid_arguments_raise(change, message):
    arguments = dict(zip(("q", "k", "v", "gates"), inputs(), strict=True)) | change
    with pytest.raises(ValueError, match=message):
        native_sparse_attention(**arguments)
