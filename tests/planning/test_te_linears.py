"""Memory that Transformer Engine's linear layers keep for the backward pass, compared with hand counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import dry_runs
import pytest
from dry_runs import ONE_GPU, configured

from megatron_ext.model.step_parts import FEED_FORWARD, FORWARD, MIXER, NORMS
from megatron_ext.planning.memory import FP8_WEIGHTS, peak_memory

HIDDEN, WIDTH, LENGTH = 2048, 5504, 4096
Dry = Callable[..., Any]


def kept(dry: Dry, *overrides: str, mixer: str = "attention", samples: int = 2) -> tuple[int, Any]:
    """Return the bytes that the forward pass of one of three layers keeps, and the whole footprint."""
    size = [f"training.{field}_batch_size={samples}" for field in ("global", "micro")]
    small = [f"model.pattern={mixer}*3", f"data.seq_length={LENGTH}", "training.recompute=none"]
    found = dry(dry_runs.footprint, configured([*ONE_GPU, *small, *size, *overrides]))
    of_layer = [
        (purpose.part, allocated)
        for purpose, allocated in found.ledger.at_peak.items()
        if purpose.layer == 1 and purpose.phase == FORWARD
    ]
    assert {part for part, allocated in of_layer if allocated} == {NORMS, MIXER, FEED_FORWARD}
    return sum(allocated for _, allocated in of_layer), found


@pytest.mark.parametrize("mixer", ["attention", "top1_chunk"])
def test_non_contiguous_linear_input_is_copied(dry: Dry, mixer: str) -> None:
    """The mixer's output is laid out sample by sample, but the following linear layer reads it token by token."""
    for samples, copies in ((1, 0), (2, 1)):
        theirs, _ = kept(dry, mixer=mixer, samples=samples)
        megatrons, _ = kept(dry, "run.backend=local", mixer=mixer, samples=samples)
        assert theirs - megatrons == copies * samples * LENGTH * HIDDEN * 2


@pytest.mark.parametrize(("fp8", "bytes_each"), [("tensorwise", 1), ("blockwise", 1 + 4 / 128)])
def test_in_eight_bits(dry: Dry, fp8: str, bytes_each: float) -> None:
    in_16, _ = kept(dry)
    in_8, found = kept(dry, f"training.fp8={fp8}")
    # Outputs of the norms, the copy of the mixer's output, and SwiGLU's output.
    multiplied = 2 * LENGTH * (3 * HIDDEN + WIDTH)
    assert in_16 - in_8 == (2 - bytes_each) * multiplied
    weights = 3 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * WIDTH)
    assert found.linear_parameters == weights
    config = configured([*ONE_GPU, f"training.fp8={fp8}"])
    assert peak_memory(config, found).kinds[FP8_WEIGHTS] == 2 * weights
    assert found.ledger.total < 2**24  # everything is freed


@pytest.mark.parametrize("recompute", ["mlp", "full"])
def test_recomputation_in_fp8(dry: Dry, recompute: str) -> None:
    """Tensor-parallel ranks with sequence parallelism, whose linear layers gather their inputs."""
    layout = ["parallel.tensor=2", "parallel.sequence=true", "parallel.context=1", "training.global_batch_size=1"]
    more = ["model.pattern=attention*3", f"data.seq_length={LENGTH}", f"training.recompute={recompute}"]
    in_16, in_8 = (
        dry(dry_runs.footprint, configured([*layout, *more, f"training.fp8={fp8}"], world_size=2), 2).ledger
        for fp8 in ("none", "tensorwise")
    )
    # The norm's output takes half the memory. Attention keeps its output in 16 bits, and the following linear layer
    # keeps it once more in 8 bits. Recomputed tensors are not kept.
    kept_in_16, kept_in_8 = (
        sum(size for purpose, size in ledger.at_peak.items() if purpose.phase == FORWARD) for ledger in (in_16, in_8)
    )
    assert kept_in_8 == kept_in_16
    assert in_8.messages == in_16.messages
    assert in_8.total == in_16.total
