"""Screening of chunks in int8: which of them may hold a query's highest product, in Triton.

With q = sq * q8 + dq and k - c = sk * k8 + dk (c any vector of the head: it moves all scores of a query alike),

    |q.(k - c) - sq * sk * q8.k8| <= |dq| |k - c| + |sq * q8| |dk|,

and q8.k8 is exact in int32. So a chunk whose bound from above is under another's bound from below cannot be the choice;
the others are a query's candidates. Each norm carries a margin for its own rounding, and each bound one for that of the
products that decide in the end (`PRODUCT_ERROR`).
"""

# mypy: ignore-errors
# Triton compiles what is below; pointers and tiles have no type in Python.

import triton
import triton.language as tl

from kernels.top1_chunk.triton_attend import COLUMNS, first_slot, head_rows, own_rows
from kernels.triton_math import load_rows, product_int8, store_rows

LEVELS = tl.constexpr(127)
SMALLEST, LARGEST = tl.constexpr(1e-30), tl.constexpr(1e30)
"""Of the highest number of a query or a chunk: beyond, it gets no bound, as fp32 may not hold its parts."""

MARGIN = tl.constexpr(1 + 2**-10)
"""On norms, whose sums of at most 256 squares are rounded to fp32."""

PRODUCT_ERROR = tl.constexpr(2**-13)
"""Over |q| |k|, at least: of products summed in fp32 in any order, even cut off, and of what is computed here."""

NUMBER_BITS = tl.constexpr(16)
MAX_CHUNKS = 2**16
"""Of one document: a candidate is a chunk's number in it and the upper half of an fp32 bound, in one int32."""


@triton.jit
def _round(x, highest):
    """(x / scale, the integers next to it as fp32, the scale); `highest` is max |x|, of a row or of all."""
    scale = tl.where((highest > SMALLEST) & (highest < LARGEST), highest / LEVELS, 1.0)
    scaled = x / scale
    return scaled, tl.floor(scaled + 0.5), scale


@triton.jit
def _norms(x, highest):
    """Norm of each row, at least; infinite where there is no bound. `highest` as in `_round`."""
    norm = tl.sqrt(tl.sum(x * x, 1)) * MARGIN
    norm = tl.where(((highest > SMALLEST) & (highest < LARGEST)) | (highest == 0), norm, float("inf"))
    # A maximum passes over what is no number, so that must not stay.
    return tl.where(norm == norm, norm, float("inf"))


@triton.jit
def quantise_queries(
    q, centre, q8, query_bounds, query_scales, rows,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Round each query to int8. Grid (rows / BLOCK_M, heads).

    Args:
        q: queries [tokens, G * R, d] of the first head.
        centre: fp32 [heads, d], c.
        q8: int8 [heads, rows, BLOCK_D], out.
        query_bounds: fp32 [heads, 2, rows], out: |dq| / sq and at least |q8|.
        query_scales: fp32 [heads, 2, rows], out: sq and at least q.c.
    """
    g = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < rows
    x = load_rows(q, head_rows(row, g, G, R), valid, HEAD_DIM, HEAD_DIM, BLOCK_D).to(tl.float32)
    highest = tl.max(tl.abs(x), 1)
    scaled, rounded, scale = _round(x, highest[:, None])
    error = _norms(scaled - rounded, highest)
    size = _norms(scaled, highest)
    store_rows(q8, g.to(tl.int64) * rows + row, valid, BLOCK_D, rounded, BLOCK_D, BLOCK_D)
    at = g.to(tl.int64) * 2 * rows + row
    tl.store(query_bounds + at, error, mask=valid)
    tl.store(query_bounds + at + rows, size + error, mask=valid)
    scale = tl.max(scale, 1)
    d = tl.arange(0, BLOCK_D)
    middle = tl.load(centre + g * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    middle_size = tl.sqrt(tl.sum(middle * middle, 0)) * MARGIN
    tl.store(query_scales + at, scale, mask=valid)
    offset = tl.sum(x * middle[None, :], 1) + size * scale * middle_size * PRODUCT_ERROR
    tl.store(query_scales + at + rows, offset, mask=valid)


@triton.jit
def _centred(k, centre, start, n, count, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Keys as they are and less the centre, fp32; 0 where there is none."""
    d = tl.arange(0, BLOCK_D)
    keys = load_rows(k, start + n, n < count, STRIDE, HEAD_DIM, BLOCK_D).to(tl.float32)
    middle = tl.load(centre + d, mask=d < HEAD_DIM, other=0.0)
    return keys, tl.where((n < count)[:, None], keys - middle[None, :], 0.0)


@triton.jit
def quantise_keys(
    k, centre, k8, chunk_bounds, table, tokens, slots,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Round the keys of each chunk, less the head's centre, to int8. Grid (slots, heads).

    Args:
        k: keys [tokens, G, d] of the first head.
        centre: fp32 [heads, d].
        k8: int8 [heads, tokens, BLOCK_D], out.
        chunk_bounds: fp32 [3, heads, slots], out: sk; what |dq| and |sq * q8| are multiplied with.
    """
    slot, g = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(table + slot * COLUMNS), tl.load(table + slot * COLUMNS + 1)
    keys_of_head, centre_of_head = k + g * HEAD_DIM, centre + g * HEAD_DIM
    highest = 0.0
    for j in range(0, CHUNK, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        _, x = _centred(keys_of_head, centre_of_head, start, n, count, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        highest = tl.maximum(highest, tl.max(tl.abs(x)))
    # In units of the scale: squares of small numbers would vanish.
    scale, size, error, product_error = 1.0, 0.0, 0.0, 0.0
    for j in range(0, CHUNK, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        keys, x = _centred(keys_of_head, centre_of_head, start, n, count, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        scaled, rounded, scale = _round(x, highest)
        size_n = _norms(scaled, highest)
        size = tl.maximum(size, tl.max(size_n))
        error = tl.maximum(error, tl.max(_norms(scaled - rounded, highest)))
        product_error = tl.maximum(product_error, tl.max(size_n + _norms(keys / scale, highest)) * PRODUCT_ERROR)
        store_rows(k8, g.to(tl.int64) * tokens + start + n, n < count, BLOCK_D, rounded, BLOCK_D, BLOCK_D)
    bound = chunk_bounds + g * slots + slot
    heads = tl.num_programs(1)
    tl.store(bound, scale)
    tl.store(bound + heads * slots, size * scale)
    tl.store(bound + 2 * heads * slots, (error + product_error) * scale)


@triton.jit
def _entry(upper, number):
    """The upper half of a bound's bits, and a chunk's number."""
    return (upper.to(tl.int32, bitcast=True) & -(2**NUMBER_BITS)) | number


@triton.jit
def upper_bound(entry):
    """At least the bound of `_entry`: what was cut off is taken as ones, and for a negative number as zeros.

    Infinity and what is no number become no number.
    """
    bits = entry & -(2**NUMBER_BITS)
    return tl.where(bits >= 0, bits | (2**NUMBER_BITS - 1), bits).to(tl.float32, bitcast=True)


@triton.jit
def chunk_number(entry):
    """The chunk of `_entry`, counted from the document's first."""
    return entry & (2**NUMBER_BITS - 1)


@triton.jit
def collect(place, rows, count, floor, highest, scale, reach, number, ends, CAPACITY: tl.constexpr):
    """Take a chunk into the rows' candidates if it may beat the best so far: (count, floor), both as they are then.

    Args:
        place: pointers to each row's candidates, `rows` apart.
        count: int32, how many a row has.
        floor: fp32, the best so far, at least: the highest bound from below.
        highest: int32, highest int8 product of the chunk.
        scale: what it is multiplied with, less sq.
        reach: fp32, how far the product itself can be off.
        number: of the chunk.
        ends: rows that it is there for.
    """
    score = highest.to(tl.float32) * scale
    upper = score + reach
    # What is no number must pass, too.
    passes = ends & ((upper < floor) == 0)
    tl.store(place + count * rows, _entry(upper, number), mask=passes & (count < CAPACITY))
    return count + passes.to(tl.int32), tl.where(ends, tl.maximum(floor, score - reach), floor)


@triton.jit
def screen(
    q8, query_bounds, k8, chunk_bounds, candidates, counts, floors, table, rows, slots, tokens,
    R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Collect each row's candidates in one pass. Grid (slots * TILES, heads): the last slots first.

    A chunk is taken if it may beat the best so far; how many of the taken still may in the end, `floors` tells. All
    scores of a row are divided by sq.

    Args:
        q8, query_bounds, k8, chunk_bounds: as from above.
        candidates: int32 [heads, CAPACITY, rows], out, see `_entry`.
        counts: int32 [heads, rows], out; above CAPACITY where there were more.
        floors: fp32 [heads, rows], out: the highest bound from below.
    """
    program, g, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = slots - 1 - program // TILES
    row, _, valid, _ = own_rows(table, slot, program % TILES, R, BLOCK_M)
    first = first_slot(table, slot)
    first_key = tl.load(table + first * COLUMNS)
    at = g.to(tl.int64) * rows + row
    queries = load_rows(q8, at, valid, BLOCK_D, BLOCK_D, BLOCK_D)
    bound = query_bounds + g.to(tl.int64) * 2 * rows + row
    query_error = tl.load(bound, mask=valid, other=0.0)
    query_size = tl.load(bound + rows, mask=valid, other=0.0)
    keys_of_head = k8 + g.to(tl.int64) * tokens * BLOCK_D
    scales = chunk_bounds + g * slots
    sizes, errors = scales + heads * slots, scales + 2 * heads * slots
    place = candidates + g.to(tl.int64) * CAPACITY * rows + row
    floor = tl.full([BLOCK_M], -float("inf"), tl.float32)
    highest = tl.zeros([BLOCK_M], tl.int32)
    count = tl.zeros([BLOCK_M], tl.int32)
    n = tl.arange(0, BLOCK_N)
    PER_CHUNK: tl.constexpr = CHUNK // BLOCK_N
    for j in range((slot - first) * PER_CHUNK):
        keys = load_rows(keys_of_head, first_key + j * BLOCK_N + n, n >= 0, BLOCK_D, BLOCK_D, BLOCK_D)
        products = tl.max(product_int8(queries, keys.T), 1)
        ends = valid
        if PER_CHUNK == 1:
            highest = products
        else:
            highest = tl.where(j % PER_CHUNK == 0, products, tl.maximum(highest, products))
            ends = valid & (j % PER_CHUNK == PER_CHUNK - 1)
        chunk = first + j // PER_CHUNK
        reach = query_error * tl.load(sizes + chunk) + query_size * tl.load(errors + chunk)
        scale = tl.load(scales + chunk)
        count, floor = collect(place, rows, count, floor, highest, scale, reach, chunk - first, ends, CAPACITY)
    tl.store(counts + at, count, mask=valid)
    tl.store(floors + at, floor, mask=valid)
