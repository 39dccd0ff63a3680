"""Dry steps on meta tensors: memory and messages per rank, compared with hand counts and GPU measurements."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import dry_runs
import pytest
from dry_runs import ONE_GPU, configured

from megatron_ext.mixers.core.registry import load_all
from megatron_ext.planning.gpus import GIB

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks"
HIDDEN = 2048
Dry = Callable[..., Any]

LAYERS = [
    pytest.param(row, id=f"{row['mixer']}-{row['hidden']}-{row['length']}")
    for number in range(4)
    for row in json.loads((BENCHMARKS / f"layers/gpu{number}.json").read_text())["rows"]
    if row["layer"] == "ours" and (row["hidden"] == 768 or row["length"] in (8192, 102400))
]
UNSEEN = {"moba": 0.45, "nsa": 0.33, "top1_chunk": 0.15}
"""Share of a layer's memory that its kernels allocate inside opaque operators, which a dry step cannot see."""


@pytest.mark.parametrize("row", LAYERS)
def test_mixer_memory_equals_measured_memory(dry: Dry, row: dict[str, Any]) -> None:
    sizes = [row[name] for name in ("mixer", "hidden", "heads", "head_dim", "length", "batch")]
    planned = dry(dry_runs.layer_bytes, *sizes)
    least = 1 - UNSEEN.get(row["mixer"], 0.04)
    assert least <= planned / row["memory_bytes"] <= 1.14


@pytest.mark.parametrize("mixer", sorted(load_all()))
def test_dry_step_of_each_mixer_frees_its_memory(dry: Dry, mixer: str) -> None:
    overlay = str(dry_runs.EXAMPLES / "mixers" / "1p3b" / f"{mixer}.yaml")
    config = configured([*ONE_GPU, overlay, f"model.pattern={mixer}*2", "data.seq_length=4096"])
    found = dry(dry_runs.footprint, config)
    assert found.ledger.total < GIB / 100  # caches that persist between steps
    assert found.ledger.peak > 2 * 4096 * HIDDEN * 2 * 4
    assert [layer.part.split()[0] for layer in found.layers] == [mixer] * 2
    assert not found.ledger.messages


@pytest.mark.parametrize("mixer", ["attention", "nsa"])
def test_a_second_dry_step_counts_the_same_memory(process: ProcessPoolExecutor, mixer: str) -> None:
    """The first one fills the caches of its process: tables of rotations, and masks of NSA's blocks."""
    config = configured([*ONE_GPU, f"model.pattern={mixer}*2", "data.seq_length=4096"])
    first, second = (process.submit(dry_runs.footprint, config).result().ledger for _ in range(2))
    assert first.at_peak == second.at_peak
    assert first.peak == second.peak


@pytest.mark.parametrize("mixer", ["attention", "gated_deltanet", "top1_chunk"])
def test_document_masking_memory(dry: Dry, mixer: str) -> None:
    small = [*ONE_GPU, f"model.pattern={mixer}*2", "data.seq_length=4096", "training.global_batch_size=2"]
    joint, masked = (
        dry(dry_runs.footprint, configured([*small, "training.micro_batch_size=2", *more]))
        for more in ([], ["data.reset_attention=true"])
    )
    # Here each sample is one document. Processing them apart needs the same memory as together, plus joined copies.
    hidden = 2 * 4096 * HIDDEN * 2
    assert joint.ledger.peak <= masked.ledger.peak <= joint.ledger.peak + 2 * 3 * hidden


def test_messages_of_tensor_and_sequence_parallelism(dry: Dry) -> None:
    config = configured(
        [
            "model.pattern=attention*3",
            "parallel.context=1",
            "training.recompute=none",
            "training.global_batch_size=1",
            "data.seq_length=2048",
        ],
        world_size=2,
    )
    found = dry(dry_runs.footprint, config, 2, 1)
    hidden = 2048 * HIDDEN * 2
    hidden_calls = Counter[str]()
    for message, count in found.ledger.messages.items():
        assert message.ranks == (0, 1)
        if message.size == hidden:
            hidden_calls[message.call] += count
    # Each layer gathers the inputs of its mixer and of its feed-forward, and again for their weight gradients. It also
    # gathers the gradients of its reduce-scattered outputs. The embedding does the same, and so does the output layer,
    # except that it keeps its gathered input.
    assert hidden_calls == {"_allgather_base_": 3 * (2 + 2 + 2) + 2, "_reduce_scatter_base_": 3 * (2 + 2) + 2}


def test_messages_of_context_parallelism_are_of_whole_heads(dry: Dry) -> None:
    config = configured(
        [
            "model.pattern=attention*3",
            "parallel.tensor=1",
            "parallel.sequence=false",
            "parallel.context=4",
            "training.recompute=none",
            "training.global_batch_size=1",
            "data.seq_length=8192",
        ],
        world_size=4,
    )
    found = dry(dry_runs.footprint, config, 4, 2)
    part = 2048 * HIDDEN * 2
    exchanged = Counter[int]()
    for message, count in found.ledger.messages.items():
        assert message.ranks == (0, 1, 2, 3)
        if message.call == "alltoall_base_":
            exchanged[message.size] += count
    # Queries, keys and values are sent in one direction and outputs back. The backward pass sends the gradients.
    assert exchanged == {3 * part: 3 * 2, part: 3 * 2}


def test_early_pipeline_stages_keep_more_activations(dry: Dry) -> None:
    stages, length = 4, 2048
    config = configured(
        [
            *ONE_GPU,
            f"parallel.pipeline={stages}",
            "model.pattern=attention*8",
            "training.recompute=none",
            "training.global_batch_size=8",
            f"data.seq_length={length}",
        ],
        world_size=4,
    )
    found = [dry(dry_runs.footprint, config, 4, rank) for rank in range(stages)]
    assert [one.stage for one in found] == [0, 1, 2, 3]
    assert [len(one.layers) for one in found] == [2] * stages
    assert [one.has_embedding for one in found] == [True, False, False, False]
    assert [one.loss_flops for one in found] == [0, 0, 0, 6 * HIDDEN * dry_runs.TOKENS]
    whole = dry(dry_runs.footprint, configured([*ONE_GPU, "model.pattern=attention*8", "data.seq_length=64"]))
    assert sum(one.parameters for one in found) == whole.parameters
    saved = [_saved_by_layer(one, 2 * stage + 1) for stage, one in enumerate(found)]
    # 1F1B: the micro-batches in flight in a stage are as many as the stages from it to the last one.
    for stage in range(stages - 1):
        assert saved[stage] / saved[stage + 1] == pytest.approx((stages - stage) / (stages - stage - 1), rel=0.1)
    size = length * HIDDEN * 2
    sent = [{(m.call, m.ranks): n for m, n in one.ledger.messages.items() if m.size == size} for one in found]
    assert sent[0] == {("send", (0, 1)): 8, ("recv_", (0, 1)): 8}
    assert sent[3] == {("send", (2, 3)): 8, ("recv_", (2, 3)): 8}
    assert sent[1] == {(call, ranks): 8 for call in ("send", "recv_") for ranks in ((0, 1), (1, 2))}


def _saved_by_layer(found: Any, layer: int) -> int:
    return sum(size for purpose, size in found.ledger.at_peak.items() if purpose.layer == layer)


def test_recomputation_reduces_memory(dry: Dry) -> None:
    peaks = []
    for recompute in ("none", "mlp", "full"):
        small = [*ONE_GPU, "model.pattern=attention*4", "data.seq_length=8192", f"training.recompute={recompute}"]
        found = dry(dry_runs.footprint, configured(small))
        peaks.append(found.ledger.peak)
    assert peaks == sorted(peaks, reverse=True)
    feed_forward, all_but_inputs = peaks[0] - peaks[1], peaks[0] - peaks[2]
    # Three layers or more keep SwiGLU's input and output and the norm's output. The fourth's are live at the peak.
    width = config_width()
    assert feed_forward >= 3 * 8192 * (3 * width + HIDDEN) * 2
    assert all_but_inputs > feed_forward


def config_width() -> int:
    width = configured(ONE_GPU).model.ffn_hidden_size
    assert width == 5504
    return width
