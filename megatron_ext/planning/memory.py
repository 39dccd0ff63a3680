"""A GPU's memory by what it is for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.schema import OptimizerConfig, RunConfig
from megatron_ext.parts import BACKWARD, FORWARD
from megatron_ext.planning.gpus import GIB, Gpu

if TYPE_CHECKING:
    from megatron_ext.planning.dry_step import Footprint

WEIGHTS, GRADIENTS, STATE, GATHERED = "weights", "gradients", "optimizer state", "gathered weights"
IN_8_BITS = "weights in 8 bits"
WORKING = "backward pass, working memory"

GATHERED_AT_ONCE = 1_500_000_000
"""Parameters that DeepSpeed's stage 3 may have gathered: max_live_parameters and a bucket, by its defaults."""

USABLE = 0.88
"""Of a GPU's memory for tensors. Its context and NCCL take some 2 GiB, and torch's allocator kept 1.09 to 1.18 times
what tensors took where there was room (docs/benchmarks/training.md); near the limit it gives back what it can."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The most that tensors of one rank take at once.

    Attributes:
        rank: in the world.
        stage: of the pipeline.
        kinds: bytes by kind, at that moment; parts of the model are what the forward pass has kept of them.
        by_layer: bytes that the forward pass has kept of each layer, by its number from 1.
    """

    rank: int
    stage: int
    kinds: dict[str, float]
    by_layer: dict[int, float]

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(self.kinds.values())

    def fits(self, gpu: Gpu) -> bool:
        """Whether they have room."""
        return self.total <= USABLE * gpu.memory

    def why_not(self, gpu: Gpu) -> str:
        """What is too much, and what would help first."""
        largest = max(self.kinds, key=lambda kind: self.kinds[kind])
        needs = f"tensors of rank {self.rank} take {self.total / GIB:.1f} GiB of {USABLE * gpu.memory / GIB:.1f} usable"
        return f"{needs}, most of it {largest} ({self.kinds[largest] / GIB:.1f})"


def memory_of(config: RunConfig, footprint: Footprint) -> Memory:
    """What a rank's step takes, with what is there throughout."""
    kinds = standing(config, footprint.parameters, len(footprint.replicas))
    if config.training.fp8 != "none":  # as they are and transposed, from one step to the next
        kinds[IN_8_BITS] = 2 * footprint.linear_parameters
    by_layer: dict[int, float] = defaultdict(float)
    for purpose, size in footprint.ledger.at_peak.items():
        if size:
            kinds[WORKING if purpose.phase == BACKWARD else purpose.part] += size
            if purpose.phase == FORWARD and purpose.layer is not None:
                by_layer[purpose.layer] += size
    return Memory(rank=footprint.rank, stage=footprint.stage, kinds=dict(kinds), by_layer=dict(by_layer))


def standing(config: RunConfig, parameters: float, replicas: int) -> defaultdict[str, float]:
    """Bytes by kind that are there throughout.

    Gradients are kept in fp32; the optimizer has two moments of each parameter, and in bf16 its precise value.

    Args:
        config: its optimizer and precision.
        parameters: of a rank's part of the model.
        replicas: ranks among which an optimizer may share out what it keeps.
    """
    optimizer, size = config.optimizer, 2 if config.training.precision == "bf16" else 4
    weights, gradients, state = shares(optimizer, replicas)
    kinds: defaultdict[str, float] = defaultdict(float)
    kinds[WEIGHTS] = size * parameters * weights
    kinds[GRADIENTS] = 4 * parameters * gradients
    kinds[STATE] = 0.0 if optimizer.offload == "cpu" else (12 if size == 2 else 8) * parameters * state
    if optimizer.sharding == "zero3":
        if optimizer.offload_parameters == "cpu":
            kinds[WEIGHTS] = 0.0
        kinds[GATHERED] = size * min(parameters, GATHERED_AT_ONCE)
    return kinds


def shares(optimizer: OptimizerConfig, replicas: int) -> tuple[float, float, float]:
    """Which part of weights, gradients and optimizer state a rank keeps (ZeRO, arXiv 1910.02054)."""
    stage = {"none": 0, "megatron": 1, "zero1": 1, "zero2": 2, "zero3": 3}[optimizer.sharding]
    part = 1 / replicas
    return part if stage >= 3 else 1.0, part if stage >= 2 else 1.0, part if stage >= 1 else 1.0
