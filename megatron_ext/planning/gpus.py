"""Specifications of GPUs, and the fractions of them that training reaches."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.config.schema import TransportName
from megatron_ext.utils.errors import UserError

GB, GIB = 1e9, 2**30

BANDWIDTH_EFFICIENCY = 0.894
"""Fraction of the specified memory bandwidth reached by a copy: 4.29 of 4.8 TB/s on an H200
(docs/benchmarks/training.md).
"""

LINK_EFFICIENCY = 0.8
"""Fraction of the specified NVLink and network bandwidth that messages reach. Assumed, not measured."""

EXCHANGE_EFFICIENCY: dict[TransportName, float] = {"nccl": 0.55, "copy_engine": 0.68}
"""Fraction of NVLink's specified bandwidth that the head exchange reaches, by transport. Between two H100s, 105 MB in
each direction took 425 microseconds with NCCL and 342 with copy engines (docs/benchmarks/training.md).
"""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Specifications of a kind of GPU, from its data sheet.

    Attributes:
        name: value of --gpu.
        memory: memory size in bytes.
        peak_flops: dense bf16 FLOP/s.
        bandwidth: memory bandwidth in bytes/s.
        nvlink: bytes/s to the other GPUs of the node, per direction.
        network: bytes/s to other nodes, per direction: the GPU's share of a typical node's adapters.
        has_8_bits: True if the GPU has FP8 matrix products.
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
"""Supported kinds of GPU by name. Values are those of SXM modules in NVIDIA's data sheets of 2020, 2022, 2023 and 2024.
A100 and H100 have 80 GiB. Each A100 has a network adapter of 200 Gbit/s, each of the others one of 400 Gbit/s.
"""

MEASURED_GPU = "h200"
"""Kind of GPU on which rates were measured. For other kinds, rates are scaled by `peak_flops`."""


def find_gpu(name: str) -> Gpu:
    """Return a kind of GPU by name.

    Raises:
        UserError: the name is unknown.
    """
    if name not in GPUS:
        raise UserError("--gpu", f"{name!r} is not supported", f"give one of {', '.join(GPUS)}")
    return GPUS[name]
