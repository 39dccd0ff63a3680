"""Compile the Triton kernels that calls of our ops launch for a Hopper GPU, without one, and print their names.

A separate program, because the test process runs Triton in its interpreter. It makes the ops' real launches on CPU
tensors, with a driver that only reports a target. A launch compiles the kernel and stops there. This finds errors that
the interpreter accepts but the compiler does not, and kernels that need more shared memory than a block can have.

Compiling a specialization takes up to five seconds. By default every compile-time branch of a kernel is taken once, and
most kernels are compiled with the tiles that need the most shared memory. `make test-exhaustive` compiles more shapes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from covering import cases
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels.based.op import based_triton
from kernels.gated_delta_rule import triton_launch as triton_launch_delta_rule
from kernels.gated_delta_rule.op import gated_delta_rule_triton
from kernels.linear_cross_entropy import triton_rows
from kernels.linear_cross_entropy.op import linear_cross_entropy_in_chunks
from kernels.native_sparse_attention.op import choose_blocks
from kernels.selective_scan.op import selective_scan_triton
from kernels.short_convolution.op import short_convolution_triton
from kernels.top1_chunk import best_by_keys, choice, triton_launch, triton_launch_screening
from kernels.top1_chunk.interface import Score
from kernels.top1_chunk.op import _problem, top1_chunk, top1_chunk_backward
from kernels.top1_element.op import top1_element, top1_element_backward

SHARED_MEMORY = 227 * 1024
"""Shared memory in bytes that one block can use on an H100 or H200."""

WITHOUT_WGMMA = (
    *("solve_chunks", "scan_chunks", "scan_chunks_back"),
    *("sum_chunks", "read_chunks", "write_query_gradients", "write_key_value_gradients"),
)
"""Kernels whose tiles are too narrow for Hopper's WGMMA instructions, as `kernels.gated_delta_rule` explains."""

compiled: set[str] = set()


class Target:
    """Triton driver without a device."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(function: JITFunction, grid: Any) -> Callable[..., None]:
    def launch(*args: Any, **options: Any) -> None:
        kernel = function.run(*args, grid=grid, warmup=True, **options)
        name = function.fn.__name__
        if name in WITHOUT_WGMMA and "wgmma" in kernel.asm["ptx"]:
            sys.exit(f"{name} takes wgmma: {options}")
        if kernel.metadata.shared > SHARED_MEMORY:
            sys.exit(f"{name} wants {kernel.metadata.shared} bytes of shared memory: {options}")
        compiled.add(name)

    return launch


def use_hopper_kernels(use: bool) -> None:
    triton_launch.on_hopper = triton_launch_screening.on_hopper = lambda x: use


def chunk(tokens: int, d: int, size: int, score: str, top_k: int = 1, backward: bool = True) -> None:
    q, k, v = (torch.zeros(1, tokens, heads, d, dtype=torch.bfloat16) for heads in (2, 1, 1))
    out, lse, chosen = top1_chunk(q, k, v, None, None, size, top_k, score, True, 1.0, 0)
    if backward:
        top1_chunk_backward(out, q, k, v, out, lse, chosen, None, size, True, 1.0, 0)


def screening(tokens: int, d: int, size: int) -> None:
    q, k = (torch.zeros(tokens, heads, d, dtype=torch.bfloat16) for heads in (2, 1))
    problem = _problem(q[None], k[None], None, size, True, 1.0, 0)
    chosen = torch.empty(1, 1, problem.rows, dtype=torch.int32)
    triton_launch_screening.select_screened(problem, q, k, chosen, torch.empty_like(q))


def choice_with_scores(tokens: int, d: int, size: int, score: Score, top_k: int) -> None:
    q, k = (torch.zeros(1, tokens, heads, d, dtype=torch.bfloat16) for heads in (2, 1))
    best_by_keys(q, k, chunk_size=size, top_k=top_k, score=score, implementation="triton")


def blocks(tokens: int, heads: int, d: int, num_earlier: int, dtype: torch.dtype = torch.bfloat16) -> None:
    q, mean_keys = torch.zeros(1, tokens, heads, d, dtype=dtype), torch.zeros(1, tokens // 64, 1, d, dtype=dtype)
    choose_blocks(q, mean_keys, torch.zeros(1, heads, tokens), 64, num_earlier, 1.0, 0)


def element(tokens: int, d: int, estimator: str) -> None:
    q, k, v = (torch.zeros(1, tokens, heads, d, dtype=torch.bfloat16) for heads in (2, 1, 1))
    for training in (False, True):
        out, soft, lse, chosen = top1_element(q, k, v, None, estimator, training, 1.0, 0)
        if training:
            mixed = out if estimator == "selected" else soft
            top1_element_backward(out, q, k, v, mixed, lse, chosen, None, estimator, 1.0, 0)


def scan(tokens: int, size: int) -> None:
    x = torch.zeros(1, tokens, 96, dtype=torch.bfloat16, requires_grad=True)
    B = torch.zeros(1, tokens, 1, size, dtype=torch.bfloat16)
    y, _ = selective_scan_triton(x, torch.zeros(1, tokens, 96), torch.zeros(96, size), B, B, None, None)
    y.sum().backward()


def delta_rule(key: int, value: int, decays: bool) -> None:
    q, v = (torch.zeros(1, 70, 2, d, dtype=torch.bfloat16, requires_grad=True) for d in (key, value))
    number = torch.zeros(1, 70, 2)
    out, _ = gated_delta_rule_triton(q, q, v, number if decays else None, number, scale=1.0, initial_state=None)
    out.sum().backward()


def based(width: int, value: int) -> None:
    q, v = (torch.zeros(1, 300, 2, d, dtype=torch.bfloat16, requires_grad=True) for d in (width, value))
    based_triton(q, q, v).sum().backward()


def convolution(width: int, taps: int, widths: list[int], biased: bool) -> None:
    x = torch.zeros(300, 2, 3, width, dtype=torch.bfloat16, requires_grad=True)[..., : sum(widths)]
    weight = torch.zeros(3, sum(widths), taps, dtype=torch.bfloat16)
    unit_length = [w < 256 for w in widths]
    bias = weight[..., 0] if biased else None
    parts = short_convolution_triton(x, torch.zeros_like(x[1:taps]), weight, bias, widths, unit_length)
    torch.autograd.backward(parts, [torch.ones_like(y) for y in parts])


def losses(vocabulary: int, dtype: torch.dtype) -> None:
    hidden, weight = torch.zeros(100, 32, dtype=dtype, requires_grad=True), torch.zeros(vocabulary, 32, dtype=dtype)
    label, counted = torch.zeros(100, dtype=torch.int64), torch.ones(100, dtype=torch.bool)
    linear_cross_entropy_in_chunks(
        hidden, weight, label, counted, 0, vocabulary, None, 64, triton_rows
    ).sum().backward()


def chunks() -> None:
    chunk(2048, 128, 128, "approx")  # with as many tokens as below, to share the kernels that order rows
    chunk(300, 16, 32, "exact_lse", top_k=2)
    chunk(2048, 128, 128, "exact", backward=False)
    choice_with_scores(512, 128, 128, "exact", 1)
    choice_with_scores(256, 16, 32, "exact_lse", 2)
    triton_launch_screening.MIN_CHUNKS, triton_launch_screening.MIN_OPERATIONS = 1, 0
    chunk(2048, 256, 128, "exact", backward=False)
    several_tiles, whole = (128, 512), (256, 128)  # several tiles of keys per chunk, or one
    for hopper in (False, True):
        use_hopper_kernels(hopper)
        for d, size in cases(every=[(16, 32), several_tiles, whole], default=[several_tiles, whole]):
            screening(2048, d, size)
    for tokens, width in cases(every=[(2048, 128), (1024, 64)], default=[(2048, 128)]):
        chunk(tokens, width, width, "approx", backward=False)


def delta_rules() -> None:
    narrow = [(16, 24, False, 0)]
    widest_keys = [(256, 64, True, 132)]  # need the most shared memory
    others = [(16, 24, False, 132), (64, 64, True, 0), (128, 256, True, 132), (256, 64, True, 0)]
    for key, value, decays, processors in cases(every=narrow + widest_keys + others, default=narrow + widest_keys):
        triton_launch_delta_rule.multiprocessors = lambda x, processors=processors: processors
        delta_rule(key, value, decays)


def main() -> None:
    driver.set_active(Target())
    choice.chunk_unsupported_reason = lambda *_: None  # pretend there is a supported GPU
    JITFunction.__getitem__ = GluonJITFunction.__getitem__ = compile_only
    chunks()
    for heads, d, num_earlier in cases(every=[(1, 64, 15), (12, 128, 16), (16, 256, 2)], default=[(16, 256, 2)]):
        blocks(300, heads, d, num_earlier)
    blocks(1, 1, 20, 2, torch.float32)
    widths = [(128, "straight_through"), (32, "selected")]
    for d, estimator in cases(every=[*widths, (128, "selected")], default=widths):
        element(300, d, estimator)
    tiles = [(300, 1), (300, 64)]  # the second has whole tiles of channels
    for tokens, size in cases(every=[*tiles, (301, 16)], default=tiles):
        scan(tokens, size)
    delta_rules()
    for width, value in cases(every=[(5, 40), (5, 100), (16, 256), (32, 128)], default=[(5, 100)]):
        based(width, value)
    convolution(320, 4, [64, 256], biased=False)
    for taps in cases(every=[2, 8], default=[2]):
        convolution(37, taps, [20, 1], biased=True)
    for vocabulary, dtype in ((300, torch.float32), (50304, torch.bfloat16)):
        losses(vocabulary, dtype)
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
