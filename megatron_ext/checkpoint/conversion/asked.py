"""For how many tokens, and within what limit, two forms of a model are compared."""

from __future__ import annotations

import math

from megatron_ext.checkpoint.conversion.family import SavedModel

LIMIT = 1e-8
"""Largest difference of two logits, relative to the largest logit or to 1.

Both models are computed in float64 from the numbers that were written. Rounding makes 1e-13 of it, 1e-11 in a deep
state-space model with large weights; a weight that is off by 1e-4 of itself makes 1e-6 or more.
"""

SHORT, LONG = 160, 8192
"""Tokens that both models are given: more than a chunk of Top-1 Chunk, and so many that a wrong rounding of positions
shows, where the model takes as many."""

KEPT = 160
"""Last positions whose logits are compared."""

_SCORES, _STATES, _WORK = 1 << 28, 1 << 22, 1e13
"""What bounds the longer one on a CPU: numbers of a layer's attention scores, and of its states (in times of 32 a
hidden feature), in a plain form; multiplications with weights, some minutes' worth."""


def lengths(saved: SavedModel, parameters: int) -> list[int]:
    """Numbers of tokens to compare a model at: a short one, and a long one where it takes more.

    Args:
        saved: the model.
        parameters: how many it has.
    """
    model = saved.model
    most = model.max_position_embeddings or SHORT
    short = min(SHORT, most)
    bounds = (math.isqrt(_SCORES // model.num_attention_heads), _STATES // model.hidden_size, int(_WORK // parameters))
    return sorted({short, max(min(LONG, most, *bounds), short)})
