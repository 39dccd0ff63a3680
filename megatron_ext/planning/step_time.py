"""Estimate of the step time from measured rates, memory bandwidth and link bandwidth.

The time of parts with matrix products is their model FLOPs divided by the measured rate of the part. A mixer's rate is
reduced if a GPU processes few heads at a time. The time of memory-bound parts is their bytes divided by the measured
bandwidth. If heads are exchanged in rounds, a fraction of the exchange is overlapped with computation
(`OVERLAP_FRACTION`). All other communication of tensor, context and pipeline parallelism, and the gradient reduction,
are assumed not to overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from megatron_ext.config.layout import layout_of, sequence_parallel
from megatron_ext.config.schema import RunConfig, TransportName
from megatron_ext.model.step_parts import (
    BACKWARD,
    COMMUNICATION,
    EMBEDDING,
    FEED_FORWARD,
    FORWARD,
    LOSS,
    MIXER,
    NORMS,
    OPTIMIZER,
)
from megatron_ext.planning.gpus import (
    BANDWIDTH_EFFICIENCY,
    EXCHANGE_EFFICIENCY,
    GPUS,
    LINK_EFFICIENCY,
    MEASURED_GPU,
    Gpu,
)
from megatron_ext.planning.memory import sharded_fractions
from megatron_ext.planning.rates import (
    PartRate,
    feed_forward_rate_name,
    interpolate_rate,
    is_measured,
    mixer_rate,
    occupancy,
)

if TYPE_CHECKING:
    from megatron_ext.mixers.core.shapes import Rounds
    from megatron_ext.planning.dry_step import Footprint, Layer
    from megatron_ext.planning.ledger import Message

BUBBLE, HOST = "pipeline bubble", "data and host"

NORM_PASSES = {FORWARD: 10.2, BACKWARD: 13.2, "recompute": 5.1}
"""Number of times that a layer's norms and residual additions read or write its hidden states in each pass.
`recompute`: additional number in the backward pass if only the feed-forward block is recomputed
(`training.recompute=mlp`). Measured on an H200 (docs/benchmarks/training.md).
"""

EMBEDDING_PASSES = 25.0
"""Number of times that the embedding reads or writes hidden states in both passes. The number is high because the
gradient is a scatter-add in any order.
"""

UPDATE_BYTES = 10.0, 63.0
"""Bytes per parameter that the optimizer update reads and writes: on every rank, and in addition on the rank that holds
the parameter's optimizer state.
"""

HOST_SECONDS = 0.012
"""Seconds per step in which the GPU waits for the batch, for the gradient norm or for kernel launches."""

HOST_SECONDS_PER_LAYER = {"none": 0.0, "tensorwise": 1.2e-3, "blockwise": 0.0}
"""Additional seconds per layer and micro-batch, by `training.fp8`. Small kernels that compute one scale per tensor make
the step host-bound. Measured with 32,768 tokens (docs/benchmarks/planning.md). With more tokens, kernels run longer and
hide more of this time.
"""

LATENCY = 2e-5
"""Seconds per collective call in addition to the transfer. Assumed, not measured, like `LINK_EFFICIENCY`."""


OVERLAP_FRACTION = {"copy_engine": 0.5, "nccl": 0.25}
"""Fraction of the head exchange's time that an exchange in rounds saves in a step, for any number of rounds. The saving
was measured and is smaller than the overlapped time (docs/benchmarks/training.md). NCCL saves time only with rounds of
samples, not with rounds of heads.
"""

SAMPLE_ROUND_PASSES = 8.0
"""Number of times that a layer's hidden states are read or written in both passes to split samples into rounds and to
concatenate the rounds.
"""

HEAD_EXCHANGE = "alltoall_base_"
"""Name of c10d's operator that exchanges heads."""

EXCHANGE_COPIES = {"nccl": 1, "copy_engine": 2}
"""Number of copies of the exchanged data on each GPU, by transport. One copy reorders the data to or from rank order.
Copy engines need another one into their send buffer.
"""

CALL_NAMES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    HEAD_EXCHANGE: "all-to-all",
    "allreduce_": "all-reduce",
    "broadcast_": "broadcast",
    "recv_": "between pipeline stages",
}
"""Usual names of c10d's operators in reports."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """Data that a rank sends in a step.

    Attributes:
        within_node: bytes over NVLink.
        between_nodes: bytes over the network.
    """

    within_node: float
    between_nodes: float


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Estimated time of a step, from the slowest pipeline stage.

    Attributes:
        parts: seconds by part; their sum is the step time.
        tokens: number of tokens of the global batch.
        volumes: communication volume by kind.
        not_measured: mixers without a measured rate, whose time is that of the median mixer.
    """

    parts: dict[str, float]
    tokens: int
    volumes: dict[str, Volume]
    not_measured: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds per step."""
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        """Throughput of all GPUs together."""
        return self.tokens / self.seconds


def step_time(config: RunConfig, footprints: Sequence[Footprint], gpu: Gpu, world_size: int, per_node: int) -> StepTime:
    """Estimate the time of a step.

    Args:
        config: configuration of the run.
        footprints: footprint of one rank of each planned pipeline stage.
        gpu: kind of GPU.
        world_size: number of ranks.
        per_node: number of ranks per node.
    """
    layout, parallel = layout_of(config, world_size), config.parallel
    links = _Links(gpu, per_node)
    stages = [_micro_batch_seconds(config, footprint, gpu, links) for footprint in footprints]
    slowest = max(range(len(stages)), key=lambda stage: sum(stages[stage].values()))
    stage_parts, footprint, num_micro_batches = stages[slowest], footprints[slowest], layout.num_micro_batches
    parts = {part: num_micro_batches * seconds for part, seconds in stage_parts.items()}
    parts[BUBBLE] = sum(stage_parts.values()) * (parallel.pipeline - 1) / parallel.virtual_pipeline
    volumes = _volumes(footprint, links, num_micro_batches)
    gradients = _data_parallel_bytes(config, footprint, num_micro_batches)
    parts[COMMUNICATION] += sum(links.seconds(footprint.replicas, size) for size in gradients)
    volumes["gradients and weights over data-parallel ranks"] = links.volume(footprint.replicas, sum(gradients))
    parts[OPTIMIZER] = _optimizer_seconds(config, footprint, gpu)
    parts[HOST] = HOST_SECONDS + num_micro_batches * len(footprint.layers) * HOST_SECONDS_PER_LAYER[config.training.fp8]
    tokens = config.training.global_batch_size * config.data.seq_length
    mixers = sorted({layer.part for footprint in footprints for layer in footprint.layers})
    not_measured = tuple(mixer for mixer in mixers if not is_measured(mixer))
    return StepTime(parts=parts, tokens=tokens, volumes=volumes, not_measured=not_measured)


@dataclass(frozen=True)
class _Links:
    gpu: Gpu
    per_node: int

    def are_within_node(self, ranks: Sequence[int]) -> bool:
        return len({rank // self.per_node for rank in ranks}) == 1

    def seconds(self, ranks: Sequence[int], size: float, nvlink_efficiency: float = LINK_EFFICIENCY) -> float:
        if not size:
            return 0.0
        within_node = self.are_within_node(ranks)
        bandwidth = nvlink_efficiency * self.gpu.nvlink if within_node else LINK_EFFICIENCY * self.gpu.network
        return LATENCY + size / bandwidth

    def volume(self, ranks: Sequence[int], size: float) -> Volume:
        if self.are_within_node(ranks):
            return Volume(within_node=size, between_nodes=0.0)
        return Volume(within_node=0.0, between_nodes=size)


def sent_bytes(message: Message) -> float:
    """Return the bytes that a rank sends in a ring collective.

    Broadcast and point-to-point messages count at their full size on the receiver; `send` counts 0.
    """
    peer_fraction = (len(message.ranks) - 1) / len(message.ranks)
    factors = {"allreduce_": 2 * peer_fraction, "send": 0.0, "recv_": 1.0, "broadcast_": 1.0}
    return factors.get(message.call, peer_fraction) * message.size


def _micro_batch_seconds(config: RunConfig, footprint: Footprint, gpu: Gpu, links: _Links) -> dict[str, float]:
    """Return the seconds of each part for one micro-batch on a rank."""
    products = _MatrixProducts(config, gpu)
    pass_seconds = _seconds_per_pass(config, gpu)
    parts: dict[str, float] = {
        MIXER: sum(products.mixer(layer) for layer in footprint.layers),
        FEED_FORWARD: sum(products.feed_forward(layer) for layer in footprint.layers),
    }
    if footprint.loss_flops:
        parts[LOSS] = products.seconds(LOSS, footprint.loss_flops)
    parts[NORMS] = len(footprint.layers) * _norm_seconds(config, pass_seconds)
    if footprint.has_embedding:
        parts[EMBEDDING] = EMBEDDING_PASSES * pass_seconds
    parts[COMMUNICATION] = _communication_seconds(config, footprint, links, parts[MIXER])
    parts[MIXER] += _exchange_copies(config, footprint, gpu, pass_seconds)
    return parts


class _MatrixProducts:
    """Time of the parts with matrix products, from their model FLOPs and measured rates."""

    def __init__(self, config: RunConfig, gpu: Gpu) -> None:
        self._hidden_size, self._seq_length = config.model.hidden_size, config.data.seq_length
        self._tokens = _tokens(config) / config.parallel.tensor
        self._relative_speed = gpu.peak_flops / GPUS[MEASURED_GPU].peak_flops
        self._recomputes_mlp = config.training.recompute != "none"
        self._recomputes_mixer = config.training.recompute == "full"
        self._linears = feed_forward_rate_name(config.training.fp8)

    def seconds(self, part: str, flops: float, recompute: bool = False) -> float:
        """Return the seconds of a part that is not a mixer.

        Args:
            part: name of its rate.
            flops: model FLOPs per token of forward and backward pass.
            recompute: True if the forward pass is recomputed.
        """
        return self._seconds_at(interpolate_rate(part, self._hidden_size, self._seq_length), flops, recompute)

    def _seconds_at(self, rate: PartRate, flops: float, recompute: bool, efficiency: float = 1.0) -> float:
        """Return the seconds at the fraction `efficiency` of a rate."""
        once = flops * self._tokens / (efficiency * rate.flops * self._relative_speed)
        return once * (1 + rate.forward_share * recompute)

    def feed_forward(self, layer: Layer) -> float:
        """Return the seconds of a layer's feed-forward."""
        return self.seconds(self._linears, layer.feed_forward_flops, self._recomputes_mlp)

    def mixer(self, layer: Layer) -> float:
        """Return the seconds of a layer's mixer. Its rate was measured on one GPU, with projections in 16 bits."""
        rate = mixer_rate(layer.part, self._hidden_size, self._seq_length)
        whole = self._seconds_at(rate, layer.mixer_flops, self._recomputes_mixer, occupancy(layer.part, layer.units))
        projections = self.seconds(FEED_FORWARD, layer.projection_flops, self._recomputes_mixer)
        projections_in_use = self.seconds(self._linears, layer.projection_flops, self._recomputes_mixer)
        # A rank that passes its state to the next rank scans its shard again. All time except the projections counts as
        # the scan.
        scans = layer.summary_scans * (whole - projections)
        saved_by_fp8 = projections - projections_in_use
        return whole + scans - saved_by_fp8


def _tokens(config: RunConfig) -> float:
    return config.training.micro_batch_size * config.data.seq_length / config.parallel.context


def _seconds_per_pass(config: RunConfig, gpu: Gpu) -> float:
    """Return the seconds in which a rank reads or writes the hidden states of one micro-batch once."""
    size = 2 if config.training.precision == "bf16" else 4
    num_shards = config.parallel.tensor if sequence_parallel(config) else 1
    return _tokens(config) * config.model.hidden_size * size / (BANDWIDTH_EFFICIENCY * gpu.bandwidth) / num_shards


def _norm_seconds(config: RunConfig, pass_seconds: float) -> float:
    """Return the seconds of a layer's norms and residual additions, which are memory-bound."""
    recompute = config.training.recompute
    passes = NORM_PASSES[FORWARD] * (1 + (recompute == "full")) + NORM_PASSES[BACKWARD]
    passes += NORM_PASSES["recompute"] * (recompute == "mlp")
    branches = 0.5 if config.model.block == "mixer" else 1.0
    return pass_seconds * passes * branches


def _communication_seconds(config: RunConfig, footprint: Footprint, links: _Links, mixer_seconds: float) -> float:
    """Return the seconds of all messages minus those overlapped with the mixers' computation."""
    transport = config.parallel.context_transport
    seconds: defaultdict[str, float] = defaultdict(float)
    for message, count in footprint.ledger.messages.items():
        efficiency = EXCHANGE_EFFICIENCY[transport] if message.call == HEAD_EXCHANGE else LINK_EFFICIENCY
        per_call = links.seconds(message.ranks, sent_bytes(message), efficiency)
        seconds[message.call] += count / footprint.micro_batches * per_call
    rounds = _exchange_rounds(footprint)
    # All layers that exchange heads are assumed to send the same amount.
    overlapped = fmean(_overlap_fraction(each, transport) for each in rounds) if rounds else 0.0
    return sum(seconds.values()) - min(seconds[HEAD_EXCHANGE] * overlapped, mixer_seconds)


def _exchange_copies(config: RunConfig, footprint: Footprint, gpu: Gpu, pass_seconds: float) -> float:
    """Return the seconds to copy exchanged heads into the order of ranks, and to split samples into rounds."""
    messages = footprint.ledger.messages.items()
    exchanged = sum(message.size * count for message, count in messages if message.call == HEAD_EXCHANGE)
    copied = 2 * EXCHANGE_COPIES[config.parallel.context_transport] * exchanged / footprint.micro_batches
    layers_in_rounds = sum(rounds.samples > 1 for rounds in _exchange_rounds(footprint))
    return layers_in_rounds * SAMPLE_ROUND_PASSES * pass_seconds + copied / (BANDWIDTH_EFFICIENCY * gpu.bandwidth)


def _exchange_rounds(footprint: Footprint) -> list[Rounds]:
    return [layer.exchange_rounds for layer in footprint.layers if layer.exchange_rounds]


def _overlap_fraction(rounds: Rounds, transport: TransportName) -> float:
    in_rounds = rounds.samples > 1 or (transport == "copy_engine" and rounds.head_groups > 1)
    return OVERLAP_FRACTION[transport] if in_rounds else 0.0


def _volumes(footprint: Footprint, links: _Links, micro_batches: int) -> dict[str, Volume]:
    """Return the data that a rank sends for all its micro-batches in a step, by kind of call."""
    volumes: dict[str, Volume] = {}
    for message, count in footprint.ledger.messages.items():
        added = links.volume(message.ranks, sent_bytes(message) * count / footprint.micro_batches * micro_batches)
        name = f"{CALL_NAMES.get(message.call, message.call)}, {len(message.ranks)} ranks"
        previous = volumes.get(name, Volume(within_node=0.0, between_nodes=0.0))
        volumes[name] = Volume(
            within_node=previous.within_node + added.within_node,
            between_nodes=previous.between_nodes + added.between_nodes,
        )
    return {name: volume for name, volume in volumes.items() if volume.within_node or volume.between_nodes}


def _data_parallel_bytes(config: RunConfig, footprint: Footprint, micro_batches: int) -> list[float]:
    """Return the bytes of each collective call over data-parallel ranks, as sent by one rank.

    Gradients are sent in fp32, weights in their storage precision.
    """
    replicas, sharding = len(footprint.replicas), config.optimizer.sharding
    peer_fraction, size = (replicas - 1) / replicas, 2 if config.training.precision == "bf16" else 4
    gradients, weights = 4.0 * footprint.parameters * peer_fraction, size * footprint.parameters * peer_fraction
    if sharding == "none":
        return [2 * gradients]
    if sharding in ("megatron", "zero1"):
        return [gradients, weights]
    if sharding == "zero2":
        return [*[gradients] * micro_batches, weights]
    return [*[gradients, weights, weights] * micro_batches]


def _optimizer_seconds(config: RunConfig, footprint: Footprint, gpu: Gpu) -> float:
    bytes_per_parameter, bytes_per_sharded_parameter = UPDATE_BYTES
    _, _, share = sharded_fractions(config.optimizer, len(footprint.replicas))
    num_bytes = footprint.parameters * (bytes_per_parameter + bytes_per_sharded_parameter * share)
    return num_bytes / (BANDWIDTH_EFFICIENCY * gpu.bandwidth)
