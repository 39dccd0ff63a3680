"""GPU memory of a rank by purpose."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_ext.config.schema import OptimizerConfig, RunConfig
from megatron_ext.model.step_parts import BACKWARD, FORWARD
from megatron_ext.planning.gpus import GIB, Gpu

if TYPE_CHECKING:
    from megatron_ext.planning.dry_step import Footprint

WEIGHTS, GRADIENTS, STATE, GATHERED = "weights", "gradients", "optimizer state", "gathered weights"
FP8_WEIGHTS = "weights in 8 bits"
WORKING = "backward pass, working memory"

MAX_GATHERED_PARAMETERS = 1_500_000_000
"""Maximum number of parameters that DeepSpeed's ZeRO-3 gathers at once: default max_live_parameters plus a bucket."""

USABLE_FRACTION = 0.88
"""Fraction of a GPU's memory available for tensors. The CUDA context and NCCL take about 2 GiB. torch's allocator
reserved 1.09 to 1.18 times the allocated bytes with free memory left (docs/benchmarks/training.md). Near the limit it
releases cached memory.
"""


@dataclass(frozen=True, kw_only=True)
class MemoryByPurpose:
    """Peak memory of the tensors of one rank.

    Attributes:
        rank: global rank.
        stage: pipeline stage of the rank, from 0.
        kinds: bytes by kind at the peak. Kinds named for model parts are activations saved by the forward pass.
        by_layer: bytes saved by the forward pass, by layer number from 1.
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
        """Return True if the tensors fit on a GPU."""
        return self.total <= USABLE_FRACTION * gpu.memory

    def describe_excess(self, gpu: Gpu) -> str:
        """Describe the required and the usable memory, and the largest kind of tensors."""
        largest = max(self.kinds, key=lambda kind: self.kinds[kind])
        usable = USABLE_FRACTION * gpu.memory
        required = f"tensors of rank {self.rank} take {self.total / GIB:.1f} of {usable / GIB:.1f} usable GiB"
        return f"{required}, mostly {largest} ({self.kinds[largest] / GIB:.1f})"


def peak_memory(config: RunConfig, footprint: Footprint) -> MemoryByPurpose:
    """Return the peak memory of a rank: persistent tensors and those of the step."""
    kinds = persistent_bytes(config, footprint.parameters, len(footprint.replicas))
    if config.training.fp8 != "none":  # FP8 copies of weights and of their transposes are kept between steps
        kinds[FP8_WEIGHTS] = 2 * footprint.linear_parameters
    by_layer: dict[int, float] = defaultdict(float)
    for purpose, size in footprint.ledger.at_peak.items():
        if size:
            kinds[WORKING if purpose.phase == BACKWARD else purpose.part] += size
            if purpose.phase == FORWARD and purpose.layer is not None:
                by_layer[purpose.layer] += size
    return MemoryByPurpose(rank=footprint.rank, stage=footprint.stage, kinds=dict(kinds), by_layer=dict(by_layer))


def persistent_bytes(config: RunConfig, parameters: float, replicas: int) -> defaultdict[str, float]:
    """Return the bytes of persistent tensors by kind.

    Gradients are kept in fp32. The optimizer state has two moments per parameter and, in bf16, the fp32 parameter.

    Args:
        config: whole configuration; its optimizer and precision are used.
        parameters: number of parameters of the rank's model shard.
        replicas: data-parallel ranks over which the optimizer may shard.
    """
    optimizer, weight_bytes = config.optimizer, 2 if config.training.precision == "bf16" else 4
    weights, gradients, state = sharded_fractions(optimizer, replicas)
    kinds: defaultdict[str, float] = defaultdict(float)
    kinds[WEIGHTS] = weight_bytes * parameters * weights
    kinds[GRADIENTS] = 4 * parameters * gradients
    kinds[STATE] = 0.0 if optimizer.offload == "cpu" else (12 if weight_bytes == 2 else 8) * parameters * state
    if optimizer.sharding == "zero3":
        if optimizer.offload_parameters == "cpu":
            kinds[WEIGHTS] = 0.0
        kinds[GATHERED] = weight_bytes * min(parameters, MAX_GATHERED_PARAMETERS)
    return kinds


def sharded_fractions(optimizer: OptimizerConfig, replicas: int) -> tuple[float, float, float]:
    """Return the fractions of weights, gradients and optimizer state that a rank keeps (ZeRO, arXiv 1910.02054)."""
    stage = {"none": 0, "megatron": 1, "zero1": 1, "zero2": 2, "zero3": 3}[optimizer.sharding]
    fraction = 1 / replicas
    return fraction if stage >= 3 else 1.0, fraction if stage >= 2 else 1.0, fraction if stage >= 1 else 1.0
