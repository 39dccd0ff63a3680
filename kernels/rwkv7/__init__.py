"""State update of RWKV-7 (Goose)."""

from kernels.rwkv7.interface import rwkv7

__all__ = ["rwkv7"]
