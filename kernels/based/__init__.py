"""Based: causal linear attention whose weights are a second-order Taylor expansion of the exponential."""

from kernels.based.features import by_features, num_features
from kernels.based.interface import based

__all__ = ["based", "by_features", "num_features"]
