"""What GPUs are said to be able to do, and what of it training reaches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.schema import TransportName
from megatron_ext.errors import UserError

GB, GIB = 1e9, 2**30

BANDWIDTH_REACHED = 0.894
"""Of the data sheet's memory bandwidth, by a copy: 4.29 of 4.8 TB/s on an H200 (docs/benchmarks/training.md)."""

LINKS_REACHED = 0.8
"""Of the data sheet's, by NVLink and network. Assumed: no run of ours on several GPUs has measured it alone."""

EXCHANGE_REACHED: dict[TransportName, float] = {"nccl": 0.55, "copy_engine": 0.68}
"""Of NVLink, by heads that are exchanged: 105 MB each way between two H100s took NCCL 425 microseconds and copy engines
342 (docs/benchmarks/training.md)."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU, by its data sheet.

    Attributes:
        name: as it is asked for.
        memory: bytes.
        peak_flops: of dense bf16 products, FLOP/s.
        bandwidth: of memory, bytes/s.
        nvlink: bytes/s to other GPUs of its node, one direction.
        network: bytes/s to other nodes, one direction, of its share of a usual node's adapters.
        has_8_bits: whether it multiplies matrices in FP8.
    """

    name: str
    memory: float
    peak_flops: float
    bandwidth: float
    nvlink: float
    network: float
    has_8_bits: bool = True


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(
            name="a100",
            memory=80 * GIB,
            peak_flops=312e12,
            bandwidth=2039 * GB,
            nvlink=300 * GB,
            network=25 * GB,
            has_8_bits=False,
        ),
        Gpu(name="h100", memory=80 * GIB, peak_flops=989e12, bandwidth=3350 * GB, nvlink=450 * GB, network=50 * GB),
        Gpu(name="h200", memory=141 * GB, peak_flops=989e12, bandwidth=4800 * GB, nvlink=450 * GB, network=50 * GB),
        Gpu(name="b200", memory=180 * GB, peak_flops=2250e12, bandwidth=8000 * GB, nvlink=900 * GB, network=50 * GB),
    )
}
"""SXM modules: NVIDIA's data sheets of 2020, 2022, 2023 and 2024; A100 and H100 with 80 GiB. Networks: an adapter of
200 Gbit/s a GPU beside A100, of 400 Gbit/s beside the others."""

MEASURED = "h200"
"""The kind that rates were measured on; for others they are scaled by the data sheets."""


def gpu_of(name: str) -> Gpu:
    """A kind of GPU.

    Raises:
        UserError: it is not known.
    """
    if name not in GPUS:
        raise UserError("--gpu", f"{name!r} is not known", f"give one of {', '.join(GPUS)}")
    return GPUS[name]
