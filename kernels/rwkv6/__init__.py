"""State update of RWKV-6 (Finch)."""

from kernels.rwkv6.interface import rwkv6

__all__ = ["rwkv6"]
