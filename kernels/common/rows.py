"""Layout of tokens in memory. Kernels take tokens in the caller's order, because a transpose costs a memory pass."""

from typing import NamedTuple, Self

from torch import Tensor


class Rows(NamedTuple):
    """Token layout: token t of sample s is row s * sample_stride + t * time_stride."""

    samples: int
    length: int
    sample_stride: int
    time_stride: int

    @classmethod
    def from_tensor(cls, x: Tensor) -> Self:
        """Return the layout of x [b, t, ...]: batch first or sequence first, by its strides."""
        samples, length = x.shape[:2]
        strides = (1, samples) if x.stride(0) < x.stride(1) else (length, 1)
        return cls(samples, length, *strides)

    def to_rows(self, x: Tensor) -> Tensor:
        """Return x [b, t, ...] as contiguous rows in memory order: [b, t, ...] or [t, b, ...]."""
        return self.reorder(x).contiguous()

    def reorder(self, x: Tensor) -> Tensor:
        """Return a view of x in the other order: from [b, t, ...] to the memory order of the rows, or back."""
        return x if self.time_stride == 1 else x.transpose(0, 1)
