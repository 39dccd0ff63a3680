"""Screening of chunks in int8: find the chunks that may contain a query's highest product, in Triton.

Let q = sq * q8 + dq and k - c = sk * k8 + dk, where c is any vector per head: it shifts all scores of a query equally.
Then

    |q.(k - c) - sq * sk * q8.k8| <= |dq| |k - c| + |sq * q8| |dk|,

and q8.k8 is exact in int32. A chunk whose upper bound is below another chunk's lower bound cannot be selected. The
remaining chunks are a query's candidates. Each norm has a margin for its own rounding error, and each bound has one for
the rounding error of the products that finally decide (`PRODUCT_ERROR`).
"""

# mypy: ignore-errors
# Triton compiles the functions below; pointers and tiles have no Python type.

import triton
import triton.language as tl

from kernels.common.triton_math import load_rows, product_int8, store_rows
from kernels.top1_chunk.triton_attend import COLUMNS, first_slot, head_rows, own_rows

LEVELS = tl.constexpr(127)
SMALLEST, LARGEST = tl.constexpr(1e-30), tl.constexpr(1e30)
"""Range of a query's or chunk's largest absolute value within which norms have a finite bound. Outside this range,
squares in fp32 may overflow or underflow, and norms count as infinite.
"""

MARGIN = tl.constexpr(1 + 2**-10)
"""Factor that makes a computed norm an upper bound despite the rounding of fp32 sums of up to 256 squares."""

PRODUCT_ERROR = tl.constexpr(2**-13)
"""Upper bound, relative to |q| |k|, of two rounding errors: that of an fp32 product, summed in any order, and that of
its computed bounds."""

INDEX_BITS = tl.constexpr(16)
MAX_CHUNKS = 2**16
"""Maximum chunks per document: `_entry` packs a chunk index and the upper half of an fp32 bound into an int32."""


@triton.jit
def _round(x, max_abs):
    """Return x / scale, its rounding to integers (as fp32), and scale. `max_abs` is max |x|, per row or overall."""
    scale = tl.where((max_abs > SMALLEST) & (max_abs < LARGEST), max_abs / LEVELS, 1.0)
    scaled = x / scale
    return scaled, tl.floor(scaled + 0.5), scale


@triton.jit
def _norms(x, max_abs):
    """Return an upper bound of each row's norm.

    It is infinite for rows with NaN, and if `max_abs` (as in `_round`) is neither 0 nor within the range.
    """
    norm = tl.sqrt(tl.sum(x * x, 1)) * MARGIN
    norm = tl.where(((max_abs > SMALLEST) & (max_abs < LARGEST)) | (max_abs == 0), norm, float("inf"))
    # A maximum ignores NaN, so NaN is replaced here.
    return tl.where(norm == norm, norm, float("inf"))


@triton.jit
def quantise_queries(
    q, centre, q8, query_bounds, query_scales, rows,
    G: tl.constexpr, R: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Round each query to int8. Grid (rows / BLOCK_M, heads).

    Args:
        q: queries [tokens, G * R, d] of the first head.
        centre: fp32 [heads, d], c of the module docstring.
        q8: int8 [heads, rows, BLOCK_D], written.
        query_bounds: fp32 [heads, 2, rows], written: |dq| / sq, and an upper bound of |q8|.
        query_scales: fp32 [heads, 2, rows], written: sq, and an upper bound of q.c.
    """
    g = tl.program_id(1)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    valid = row < rows
    x = load_rows(q, head_rows(row, g, G, R), valid, HEAD_DIM, HEAD_DIM, BLOCK_D).to(tl.float32)
    max_abs = tl.max(tl.abs(x), 1)
    scaled, rounded, scale = _round(x, max_abs[:, None])
    error = _norms(scaled - rounded, max_abs)
    norm = _norms(scaled, max_abs)
    store_rows(q8, g.to(tl.int64) * rows + row, valid, BLOCK_D, rounded, BLOCK_D, BLOCK_D)
    index = g.to(tl.int64) * 2 * rows + row
    tl.store(query_bounds + index, error, mask=valid)
    tl.store(query_bounds + index + rows, norm + error, mask=valid)
    scale = tl.max(scale, 1)
    d = tl.arange(0, BLOCK_D)
    centre_d = tl.load(centre + g * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
    centre_norm = tl.sqrt(tl.sum(centre_d * centre_d, 0)) * MARGIN
    tl.store(query_scales + index, scale, mask=valid)
    offset = tl.sum(x * centre_d[None, :], 1) + norm * scale * centre_norm * PRODUCT_ERROR
    tl.store(query_scales + index + rows, offset, mask=valid)


@triton.jit
def _load_centred(k, centre, start, n, count, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return keys unchanged and minus the centre, in fp32; 0 for missing keys."""
    d = tl.arange(0, BLOCK_D)
    keys = load_rows(k, start + n, n < count, STRIDE, HEAD_DIM, BLOCK_D).to(tl.float32)
    centre_d = tl.load(centre + d, mask=d < HEAD_DIM, other=0.0)
    return keys, tl.where((n < count)[:, None], keys - centre_d[None, :], 0.0)


@triton.jit
def quantise_keys(
    k, centre, k8, chunk_bounds, table, tokens, slots,
    G: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Round the keys of each chunk minus the head's centre to int8. Grid (slots, heads).

    Args:
        k: keys [tokens, G, d] of the first head.
        centre: fp32 [heads, d].
        k8: int8 [heads, tokens, BLOCK_D], written.
        chunk_bounds: fp32 [3, heads, slots], written: sk, and the factors on |dq| and |sq * q8|.
    """
    slot, g = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(table + slot * COLUMNS), tl.load(table + slot * COLUMNS + 1)
    head_keys, head_centre = k + g * HEAD_DIM, centre + g * HEAD_DIM
    max_abs = 0.0
    for j in range(0, CHUNK, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        _, x = _load_centred(head_keys, head_centre, start, n, count, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        max_abs = tl.maximum(max_abs, tl.max(tl.abs(x)))
    # Norms are in units of the scale, because squares of small values would underflow.
    scale, norm, error, product_error = 1.0, 0.0, 0.0, 0.0
    for j in range(0, CHUNK, BLOCK_N):
        n = j + tl.arange(0, BLOCK_N)
        keys, x = _load_centred(head_keys, head_centre, start, n, count, G * HEAD_DIM, HEAD_DIM, BLOCK_D)
        scaled, rounded, scale = _round(x, max_abs)
        norm_n = _norms(scaled, max_abs)
        norm = tl.maximum(norm, tl.max(norm_n))
        error = tl.maximum(error, tl.max(_norms(scaled - rounded, max_abs)))
        product_error = tl.maximum(product_error, tl.max(norm_n + _norms(keys / scale, max_abs)) * PRODUCT_ERROR)
        store_rows(k8, g.to(tl.int64) * tokens + start + n, n < count, BLOCK_D, rounded, BLOCK_D, BLOCK_D)
    bound = chunk_bounds + g * slots + slot
    heads = tl.num_programs(1)
    tl.store(bound, scale)
    tl.store(bound + heads * slots, norm * scale)
    tl.store(bound + 2 * heads * slots, (error + product_error) * scale)


@triton.jit
def _entry(upper, document_chunk):
    """Pack the upper half of an fp32 bound's bits and a chunk index into an int32."""
    return (upper.to(tl.int32, bitcast=True) & -(2**INDEX_BITS)) | document_chunk


@triton.jit
def upper_bound(entry):
    """Return an fp32 upper bound of the bound packed by `_entry`.

    `_entry` drops the lower bits of the bound. They are replaced by ones in a positive bound and by zeros in a negative
    bound. So +inf and NaN become NaN, and -inf stays.
    """
    bits = entry & -(2**INDEX_BITS)
    return tl.where(bits >= 0, bits | (2**INDEX_BITS - 1), bits).to(tl.float32, bitcast=True)


@triton.jit
def chunk_index(entry):
    """Return the chunk index packed by `_entry`, relative to the document's first chunk."""
    return entry & (2**INDEX_BITS - 1)


@triton.jit
def collect(
    entries, rows, count, floor, highest, scale, error_bound, document_chunk, is_last_tile, CAPACITY: tl.constexpr
):  # fmt: skip
    """Add a chunk to the candidates of the rows in which it may have the highest score. Return the new (count, floor).

    All arguments except `scale`, `rows`, `document_chunk` and CAPACITY have an element per row.

    Args:
        entries: pointers to each row's first candidate. Successive candidates of a row are `rows` elements apart.
        count: int32, number of candidates.
        floor: fp32, highest lower bound of the chunks so far.
        highest: int32, highest product of the int8 query with the chunk's int8 keys.
        scale: sk of the chunk. Scores are in units of the query's sq.
        error_bound: fp32, upper bound of the error of `highest * scale`.
        document_chunk: index of the chunk in its document.
        is_last_tile: mask of valid rows at the chunk's last tile of keys, False at earlier tiles.
    """
    score = highest.to(tl.float32) * scale
    upper = score + error_bound
    # Written as "not less", so that NaN passes.
    passes = is_last_tile & ((upper < floor) == 0)
    tl.store(entries + count * rows, _entry(upper, document_chunk), mask=passes & (count < CAPACITY))
    return count + passes.to(tl.int32), tl.where(is_last_tile, tl.maximum(floor, score - error_bound), floor)


@triton.jit
def screen(
    q8, query_bounds, k8, chunk_bounds, candidates, counts, floors, table, rows, slots, tokens,
    R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
    TILES: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """Collect each row's candidates in one pass. Grid (slots * TILES, heads), the last slots first.

    A chunk becomes a candidate if its upper bound is not below the highest lower bound so far. By the final lower
    bounds in `floors`, `triton_recheck` excludes candidates that were added early. All scores of a row are divided by
    sq.

    Args:
        q8, query_bounds, k8, chunk_bounds: outputs of `quantise_queries` and `quantise_keys`.
        candidates: int32 [heads, CAPACITY, rows], written, see `_entry`.
        counts: int32 [heads, rows], written: number of candidates. Those beyond CAPACITY are counted but not stored.
        floors: fp32 [heads, rows], written: the highest lower bound.
    """
    program, g, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot = slots - 1 - program // TILES
    row, _, valid, _ = own_rows(table, slot, program % TILES, R, BLOCK_M)
    first = first_slot(table, slot)
    first_key = tl.load(table + first * COLUMNS)
    index = g.to(tl.int64) * rows + row
    queries = load_rows(q8, index, valid, BLOCK_D, BLOCK_D, BLOCK_D)
    bound = query_bounds + g.to(tl.int64) * 2 * rows + row
    query_error = tl.load(bound, mask=valid, other=0.0)
    query_norm = tl.load(bound + rows, mask=valid, other=0.0)
    head_keys = k8 + g.to(tl.int64) * tokens * BLOCK_D
    scales = chunk_bounds + g * slots
    key_norms, key_errors = scales + heads * slots, scales + 2 * heads * slots
    entries = candidates + g.to(tl.int64) * CAPACITY * rows + row
    floor = tl.full([BLOCK_M], -float("inf"), tl.float32)
    highest = tl.zeros([BLOCK_M], tl.int32)
    count = tl.zeros([BLOCK_M], tl.int32)
    n = tl.arange(0, BLOCK_N)
    PER_CHUNK: tl.constexpr = CHUNK // BLOCK_N
    for j in range((slot - first) * PER_CHUNK):
        keys = load_rows(head_keys, first_key + j * BLOCK_N + n, n >= 0, BLOCK_D, BLOCK_D, BLOCK_D)
        products = tl.max(product_int8(queries, keys.T), 1)
        is_last_tile = valid
        if PER_CHUNK == 1:
            highest = products
        else:
            highest = tl.where(j % PER_CHUNK == 0, products, tl.maximum(highest, products))
            is_last_tile = valid & (j % PER_CHUNK == PER_CHUNK - 1)
        chunk = first + j // PER_CHUNK
        error_bound = query_error * tl.load(key_norms + chunk) + query_norm * tl.load(key_errors + chunk)
        scale = tl.load(scales + chunk)
        count, floor = collect(
            entries, rows, count, floor, highest, scale, error_bound, chunk - first, is_last_tile, CAPACITY
        )
    tl.store(counts + index, count, mask=valid)
    tl.store(floors + index, floor, mask=valid)
