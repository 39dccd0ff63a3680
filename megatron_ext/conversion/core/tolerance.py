"""Sequence lengths and tolerance for the comparison of a converted model's logits with the original's."""

from __future__ import annotations

import math

from megatron_ext.conversion.core.family import SavedModel

LIMIT = 1e-8
"""Largest accepted difference of two logits, relative to the largest absolute logit or to 1.

Both models are computed in float64 from the stored values. Rounding causes differences of about 1e-13, or 1e-11 in a
deep state-space model with large weights. A relative error of 1e-4 in one weight causes 1e-6 or more.
"""

SHORT_LENGTH, LONG_LENGTH = 160, 8192
"""Numbers of tokens at which the models are compared.

The short length exceeds a chunk of Top-1 Chunk. The long length reveals wrongly rounded positions. It is used only if
the model supports longer sequences.
"""

MAX_POSITIONS = 160
"""Maximum number of last positions whose logits are compared."""

_MAX_SCORES, _MAX_STATES, _MAX_MULTIPLICATIONS = 1 << 28, 1 << 22, 1e13
"""Limits of the longer sequence on a CPU.

They bound the attention scores of a layer, the states of a layer in head groups of 32 per hidden feature, and the
multiplications with weights, which take some minutes.
"""


def comparison_lengths(saved: SavedModel, parameters: int) -> list[int]:
    """Return the numbers of tokens at which to compare a model: a short one, and a long one if the model supports it.

    Args:
        saved: the model.
        parameters: number of its parameters.
    """
    model = saved.model
    max_length = model.max_position_embeddings or SHORT_LENGTH
    short = min(SHORT_LENGTH, max_length)
    limits = (
        math.isqrt(_MAX_SCORES // model.num_attention_heads),
        _MAX_STATES // model.hidden_size,
        int(_MAX_MULTIPLICATIONS // parameters),
    )
    return sorted({short, max(min(LONG_LENGTH, max_length, *limits), short)})
