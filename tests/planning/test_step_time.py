"""Planned step times, compared with GPU measurements and hand counts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import dry_runs
import pytest
from dry_runs import ONE_GPU, configured

from megatron_ext.config.schema import TransportName
from megatron_ext.model.step_parts import COMMUNICATION, FEED_FORWARD, LOSS, MIXER, NORMS, OPTIMIZER
from megatron_ext.planning import step_time as module
from megatron_ext.planning.gpus import BANDWIDTH_EFFICIENCY, EXCHANGE_EFFICIENCY, GPUS, LINK_EFFICIENCY
from megatron_ext.planning.ledger import Message
from megatron_ext.planning.rates import Rate, interpolate_rate, measured_rates, mixer_rate, occupancy
from megatron_ext.planning.step_time import (
    BUBBLE,
    HOST,
    HOST_SECONDS_PER_LAYER,
    LATENCY,
    sent_bytes,
    step_time,
)

TRAINING = Path(__file__).parents[2] / "docs" / "benchmarks" / "training"
H200 = GPUS["h200"]
SMALL = ("model.pattern=attention*4", "data.seq_length=2048", "training.recompute=none")
Dry = Callable[..., Any]


def planned(dry: Dry, overrides: list[str], world_size: int = 1, per_node: int = 8, gpu: str = "h200") -> Any:
    config = configured(overrides, world_size)
    stages = config.parallel.pipeline
    ranks = [stage * (world_size // stages) for stage in range(stages)]
    footprints = [dry(dry_runs.footprint, config, world_size, rank) for rank in ranks]
    return step_time(config, footprints, GPUS[gpu], world_size, per_node)


def test_run_that_contributed_no_rate(dry: Dry) -> None:
    """Fifty steps of Top-1 Chunk on real text, from a run that contributed no rate.

    The mixer's rate is from another commit, and the other rates are from runs with another mixer.
    """
    steps = [json.loads(line) for line in (TRAINING / "approx_100k_e5273c8.jsonl").read_text().splitlines()]
    speed = median(step["tokens_per_second"] for step in steps[10:])
    overrides = [*ONE_GPU, "training.global_batch_size=1", "training.recompute=mlp", "mixers.top1_chunk.score=approx"]
    found = planned(dry, overrides)
    assert found.tokens == 102400
    assert found.tokens_per_second == pytest.approx(speed, rel=0.05)


def test_time_grows_with_samples_and_recomputation(dry: Dry) -> None:
    one = planned(dry, [*ONE_GPU, *SMALL, "training.global_batch_size=1"])
    two = planned(dry, [*ONE_GPU, *SMALL, "training.global_batch_size=2"])
    assert two.parts[MIXER] == pytest.approx(2 * one.parts[MIXER])
    assert two.parts[OPTIMIZER] == one.parts[OPTIMIZER]
    assert two.parts[HOST] == one.parts[HOST]
    again = planned(dry, [*ONE_GPU, *SMALL, "training.global_batch_size=1", "training.recompute=mlp"])
    assert again.parts[MIXER] == one.parts[MIXER]
    share = interpolate_rate(FEED_FORWARD, 2048, 2048).forward_share
    assert again.parts[FEED_FORWARD] == pytest.approx(one.parts[FEED_FORWARD] * (1 + share))


@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
def test_fp8_saves_projection_time(dry: Dry, fp8: str) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=2", "training.micro_batch_size=1"]
    in_16, in_8 = (planned(dry, [*overrides, f"training.fp8={each}"]) for each in ("none", fp8))
    width = configured(overrides).model.ffn_hidden_size
    assert width is not None
    gained = in_16.parts[FEED_FORWARD] - in_8.parts[FEED_FORWARD]
    assert gained > 0
    # The projections of queries, keys, values and outputs are four matrices, a feed-forward has three.
    projections = gained * 4 * 2048 / (3 * width)
    assert in_16.parts[MIXER] - in_8.parts[MIXER] == pytest.approx(projections)
    # Two micro-batches with four layers each.
    assert in_8.parts[HOST] - in_16.parts[HOST] == pytest.approx(2 * 4 * HOST_SECONDS_PER_LAYER[fp8])
    others = set(in_16.parts) - {MIXER, FEED_FORWARD, HOST}
    assert {part: in_8.parts[part] for part in others} == {part: in_16.parts[part] for part in others}


def test_gradients_use_network_between_nodes(dry: Dry) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=2"]
    within, between = (planned(dry, overrides, world_size=2, per_node=per_node) for per_node in (2, 1))
    config = configured(overrides, 2)
    parameters = dry(dry_runs.footprint, config, 2, 0).parameters
    half = (4 + 2) * parameters / 2  # fp32 gradients and bf16 weights: a ring of two ranks sends half of each
    (name,) = within.volumes
    assert within.volumes[name].within_node == half
    assert within.volumes[name].between_nodes == 0
    assert between.volumes[name].between_nodes == half
    for found, bandwidth in ((within, H200.nvlink), (between, H200.network)):
        assert found.parts[COMMUNICATION] == pytest.approx(half / bandwidth / LINK_EFFICIENCY + 2 * LATENCY)


@pytest.mark.parametrize("transport", ["nccl", "copy_engine"])
def test_head_exchange_in_rounds_overlaps_with_copy_engines(dry: Dry, transport: TransportName) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=1", "data.seq_length=102400", "parallel.context=2"]
    overrides.append(f"parallel.context_transport={transport}")
    found = {
        rounds: planned(dry, [*overrides, f"parallel.context_exchange_rounds={rounds}"], world_size=2)
        for rounds in (1, 2, 8)
    }
    # Queries, keys, values and outputs in bf16, forward and backward. Each rank sends half of its data to the other.
    size = 4 * 2 * (4 * 2048 * 2) * 51200 / 2
    messages = 4 * 2 * 2  # per layer: two all-to-alls, forward and backward
    for rounds, one in found.items():
        assert one.volumes["all-to-all, 2 ranks"].within_node == size
        seconds = size / (EXCHANGE_EFFICIENCY[transport] * H200.nvlink)
        more = (rounds - 1) * messages * LATENCY
        hides = transport == "copy_engine"
        hidden = (seconds + rounds * messages * LATENCY) / 2 if hides and rounds > 1 else 0.0
        assert one.parts[COMMUNICATION] == pytest.approx(found[1].parts[COMMUNICATION] + more - hidden)
        assert one.parts[MIXER] == found[1].parts[MIXER]


@pytest.mark.parametrize(("transport", "hidden"), [("nccl", 0.25), ("copy_engine", 0.5)])
def test_rounds_of_samples_overlap_and_copy_hidden_states(dry: Dry, transport: TransportName, hidden: float) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=2", "training.micro_batch_size=2"]
    overrides += ["data.seq_length=102400", "parallel.context=2", f"parallel.context_transport={transport}"]
    at_once, several = (
        planned(dry, [*overrides, f"parallel.context_exchange_rounds={n}"], world_size=2) for n in (1, 2)
    )
    messages = 4 * 2 * 2  # per layer: two all-to-alls, forward and backward
    size = 4 * 2 * (4 * 2048 * 2) * 102400 / 2  # queries, keys, values and outputs in bf16; half is sent
    whole = size / (EXCHANGE_EFFICIENCY[transport] * H200.nvlink) + 2 * messages * LATENCY
    shorter = at_once.parts[COMMUNICATION] - several.parts[COMMUNICATION]
    assert shorter == pytest.approx(hidden * whole - messages * LATENCY)
    copies = 4 * 8 * (102400 * 2048 * 2) / (BANDWIDTH_EFFICIENCY * H200.bandwidth)
    assert several.parts[MIXER] - at_once.parts[MIXER] == pytest.approx(copies)


def test_state_passing_layers_do_not_split_samples(dry: Dry) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=2", "training.micro_batch_size=2"]
    overrides += ["data.seq_length=102400", "parallel.context=2"]

    def copies(pattern: str) -> float:
        in_rounds = [*overrides, f"model.pattern={pattern}", "parallel.context_exchange_rounds=2"]
        at_once = [*overrides, f"model.pattern={pattern}"]
        several, one = (planned(dry, variant, world_size=2) for variant in (in_rounds, at_once))
        return several.parts[MIXER] - one.parts[MIXER]

    assert copies("top1_chunk*2,gated_deltanet*2") == pytest.approx(copies("top1_chunk*4") / 2)


def test_overlap_is_limited_by_mixer_time(dry: Dry) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=1", "data.seq_length=128", "parallel.context=2"]
    overrides.append("parallel.context_transport=copy_engine")
    one, several = (planned(dry, [*overrides, f"parallel.context_exchange_rounds={n}"], world_size=2) for n in (1, 8))
    more_messages = 4 * 2 * 2 * (8 - 1)
    longer = several.parts[COMMUNICATION] - one.parts[COMMUNICATION]
    packed = 2 * 2 * 4 * 2 * (4 * 2048 * 2) * 64 / (BANDWIDTH_EFFICIENCY * H200.bandwidth)
    assert longer == pytest.approx(more_messages * LATENCY - (one.parts[MIXER] - packed))


def test_exchanged_heads_are_copied_into_rank_order(dry: Dry) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=1", "data.seq_length=4096"]
    alone = planned(dry, overrides)
    tensors = 4 * 2 * 4 * (2 * 2048 * 2048)  # bytes on a rank for all layers, both directions
    for transport, copies in (("nccl", 1), ("copy_engine", 2)):
        two = planned(dry, [*overrides, "parallel.context=2", f"parallel.context_transport={transport}"], world_size=2)
        copied = 2 * copies * tensors / (BANDWIDTH_EFFICIENCY * H200.bandwidth)
        assert two.parts[MIXER] == pytest.approx(alone.parts[MIXER] / 2 + copied)


@pytest.mark.parametrize("exchange", ["states", "heads"])
def test_state_passing_adds_summary_scan(dry: Dry, exchange: str) -> None:
    overrides = [*ONE_GPU, *SMALL, "model.pattern=gated_deltanet*4", "training.global_batch_size=1"]
    alone = planned(dry, overrides)
    two = planned(dry, [*overrides, "parallel.context=2", f"parallel.context_exchange={exchange}"], world_size=2)
    # Queries, keys, values, gates and outputs, and beta and alpha of 16 heads. Six operations per weight and token.
    projections = 4 * (5 * 2048 + 2 * 16) * 2048 * 6 * 2048 / interpolate_rate(FEED_FORWARD, 2048, 2048).flops
    copied = 2 * (4 * 2 * 2 * (5 * 2048 + 2 * 16) * 1024) / (BANDWIDTH_EFFICIENCY * H200.bandwidth)
    half = alone.parts[MIXER] / 2  # half the work as one piece; eight heads run less efficiently than sixteen
    more = {"states": half - projections / 2, "heads": half / occupancy("gated_deltanet", 8) - half + copied}
    assert two.parts[MIXER] == pytest.approx(half + more[exchange], rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "world_size", "units"),
    [
        ((), 1, 16),
        (("training.micro_batch_size=2",), 1, 32),
        (("parallel.tensor=4",), 4, 4),
        (("parallel.context=4",), 4, 16),  # passes recurrent states
        (("parallel.context=4", "parallel.context_exchange=heads"), 4, 4),
        (("parallel.context=4", "parallel.context_exchange=heads", "parallel.context_exchange_rounds=2"), 4, 2),
        (("parallel.tensor=2", "parallel.context=2", "parallel.context_exchange=heads"), 4, 4),
    ],
)
def test_few_heads_reduce_mixer_rate(
    dry: Dry, monkeypatch: pytest.MonkeyPatch, layout: tuple[str, ...], world_size: int, units: int
) -> None:
    overrides = [*ONE_GPU, *SMALL, "model.pattern=gated_deltanet*4", "training.global_batch_size=2", *layout]
    calls = []
    monkeypatch.setattr(module, "occupancy", lambda part, units: calls.append((part, units)) or 0.5)
    slower = planned(dry, overrides, world_size=world_size)
    assert set(calls) == {("gated_deltanet", units)}
    monkeypatch.setattr(module, "occupancy", lambda part, units: 1.0)
    assert slower.parts[MIXER] > 1.5 * planned(dry, overrides, world_size=world_size).parts[MIXER]


def test_no_overlap_for_mixer_of_one_call(dry: Dry) -> None:
    """Mamba mixes all heads in one call, so exchange rounds cannot overlap with computation."""
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=1", "parallel.context=2", "model.pattern=mamba*4"]
    overrides.append("parallel.context_exchange=heads")
    one, several = (planned(dry, [*overrides, f"parallel.context_exchange_rounds={n}"], world_size=2) for n in (1, 8))
    assert several == one


@pytest.mark.parametrize(
    ("sharding", "bytes_sent"),
    [("none", 2 * 4), ("megatron", 4 + 2), ("zero1", 4 + 2), ("zero2", 3 * 4 + 2), ("zero3", 3 * (4 + 2 + 2))],
)
def test_bytes_sent_by_sharding(dry: Dry, sharding: str, bytes_sent: int) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=6", f"optimizer.sharding={sharding}"]
    found = planned(dry, overrides, world_size=2)  # three micro-batches per rank
    parameters = dry(dry_runs.footprint, configured(overrides, 2), 2, 0).parameters
    (volume,) = found.volumes.values()
    assert volume.within_node == bytes_sent * parameters / 2


def test_pipeline_bubble(dry: Dry) -> None:
    overrides = [*ONE_GPU, *SMALL, "parallel.pipeline=2", "training.global_batch_size=4"]
    found = planned(dry, overrides, world_size=2)
    busy = sum(seconds for part, seconds in found.parts.items() if part not in (BUBBLE, OPTIMIZER, HOST))
    assert found.parts[BUBBLE] == pytest.approx(
        busy / 4, rel=0.02
    )  # without gradient reduction, as there is only one data-parallel replica of each stage


def test_rates_scale_with_data_sheet(dry: Dry) -> None:
    overrides = [*ONE_GPU, *SMALL, "training.global_batch_size=1"]
    h200, h100, b200 = (planned(dry, overrides, gpu=gpu) for gpu in ("h200", "h100", "b200"))
    assert h100.parts[MIXER] == h200.parts[MIXER]
    assert h100.parts[NORMS] == pytest.approx(h200.parts[NORMS] * 4800 / 3350)
    assert b200.parts[MIXER] == pytest.approx(h200.parts[MIXER] * 989 / 2250)


@pytest.mark.parametrize(
    ("call", "size", "expected"),
    [
        ("allreduce_", 8, 12),
        ("_allgather_base_", 8, 6),
        ("_reduce_scatter_base_", 8, 6),
        ("alltoall_base_", 8, 6),
        ("recv_", 8, 8),
        ("send", 8, 0),
    ],
)
def test_sent_bytes(call: str, size: int, expected: float) -> None:
    assert sent_bytes(Message(call, (0, 1, 2, 3), size)) == expected


def test_rates_are_interpolated() -> None:
    points = [
        Rate(part="m", hidden_size=64, seq_length=1024, flops=1e12, forward_share=0.2, source=""),
        Rate(part="m", hidden_size=64, seq_length=4096, flops=3e12, forward_share=0.4, source=""),
        Rate(part="m", hidden_size=1024, seq_length=1024, flops=9e12, forward_share=None, source=""),
    ]
    between = interpolate_rate("m", 70, 2048, points)
    assert between.flops == pytest.approx(2e12)
    assert between.forward_share == pytest.approx(0.3)
    assert interpolate_rate("m", 64, 512, points).flops == 1e12
    assert interpolate_rate("m", 64, 10**6, points).flops == 3e12
    assert interpolate_rate("m", 1000, 2048, points).flops == 9e12
    assert interpolate_rate("m", 1000, 2048, points).forward_share == pytest.approx(1 / 3)
    with pytest.raises(KeyError):
        interpolate_rate("other", 64, 1024, points)


def test_unmeasured_mixer_has_median_rate() -> None:
    parts = {rate.part for rate in measured_rates()} - {FEED_FORWARD, LOSS}
    others = sorted(interpolate_rate(p, 2048, 8192).flops for p in parts if not p.startswith(FEED_FORWARD))
    assert len(others) % 2 == 0
    assert mixer_rate("other", 2048, 8192).flops == sum(others[len(others) // 2 - 1 :][:2]) / 2
    assert mixer_rate("moba", 2048, 8192) == interpolate_rate("moba", 2048, 8192)


def test_occupancy_is_relative_to_largest_measurement() -> None:
    of_m = {"part": "m", "hidden_size": 64, "forward_share": None, "source": ""}
    points = [
        Rate(**of_m, seq_length=1024, flops=7e12),
        Rate(**of_m, seq_length=4096, flops=4e12, units=16),
        Rate(**of_m, seq_length=4096, flops=1e12, units=4),
    ]
    assert [occupancy("m", units, points) for units in (2, 4, 8, 16, 64)] == pytest.approx([0.25, 0.25, 0.625, 1, 1])
    assert occupancy("other", 1, points) == 1
    assert interpolate_rate("m", 64, 4096, points).flops == 7e12  # the rate at enough units to fill the GPU


def test_rates_are_below_peak_flops_except_for_skipped_work() -> None:
    """Top-1 Chunk's exact scores are counted at full precision but mostly computed in 8 bits."""
    above = {rate.part for rate in measured_rates() if rate.flops > H200.peak_flops}
    assert above == {"top1_chunk exact"}
    assert replace(measured_rates()[0], flops=1.0) != measured_rates()[0]
