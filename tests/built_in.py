"""Names of this project's own mixers, for tests of what each of them must have. A mixer from elsewhere need not."""

from __future__ import annotations

_NAMES = """
attention based deltanet gated_deltanet gla linear_attention mamba mamba2 moba nsa retnet rwkv6 rwkv7 top1_chunk
top1_element
"""
MIXERS = frozenset(_NAMES.split())
