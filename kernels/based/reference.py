"""Based in plain torch: chunked linear attention over Taylor features.

Suffixes: b batch, h head, t position, f width of queries and keys, e value dim.
"""

from torch import Tensor

from kernels.based.features import by_features
from kernels.common.attention_math import compute_dtype
from kernels.common.dispatch import full_precision
from kernels.gated_linear_attention.reference import chunked as linear_attention


def chunked(q_bthf: Tensor, k_bthf: Tensor, v_bthe: Tensor) -> Tensor:
    """Compute `based` by chunked linear attention, in fp32 (float64 for float64).

    Args:
        q_bthf: queries [b, t, h, f].
        k_bthf: keys [b, t, h, f].
        v_bthe: values [b, t, h, e].

    Returns:
        o [b, t, h, e] in the values' dtype.
    """

    def scan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, length, heads, width = q.shape
        nothing_decays = q.new_zeros(batch, length, heads, 1)
        state = q.new_zeros(batch, heads, width, v.shape[-1])
        with full_precision(q):
            return linear_attention(q, k, v, nothing_decays, scale=1.0, state_bhde=state)[0]

    return by_features(q_bthf, k_bthf, v_bthe, scan, dtype=compute_dtype(q_bthf))
