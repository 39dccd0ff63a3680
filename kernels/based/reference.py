"""Based in plain torch: the features, and linear attention by chunks.

Suffixes: b batch, h head, t position, f width of queries and keys, e value dim.
"""

from torch import Tensor

from kernels.attention_math import compute_dtype
from kernels.based.features import by_features
from kernels.gated_linear_attention import gated_linear_attention


def chunked(q_bthf: Tensor, k_bthf: Tensor, v_bthe: Tensor) -> Tensor:
    """See `based`; in fp32, or in float64 for float64.

    Args:
        q_bthf: queries [b, t, h, f].
        k_bthf: keys [b, t, h, f].
        v_bthe: values [b, t, h, e].

    Returns:
        o [b, t, h, e] in the values' dtype.
    """

    def walk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gated_linear_attention(q, k, v, scale=1.0, implementation="chunked")

    return by_features(q_bthf, k_bthf, v_bthe, walk, dtype=compute_dtype(q_bthf))
