"""Based's linear attention: weights that are the first terms of the exponential, over their sum."""

from kernels.based.features import by_features, num_features
from kernels.based.interface import based

__all__ = ["based", "by_features", "num_features"]
