"""How tokens lie in memory: an op's kernels take them in the caller's order, as turning them around costs a pass."""

from typing import NamedTuple, Self

from torch import Tensor


class Rows(NamedTuple):
    """Token t of sample s is row s * sample_stride + t * time_stride."""

    samples: int
    length: int
    sample_stride: int
    time_stride: int

    @classmethod
    def of(cls, x: Tensor) -> Self:
        """In the order in which x [b, t, ...] has its tokens: sample by sample, or time by time."""
        samples, length = x.shape[:2]
        strides = (1, samples) if x.stride(0) < x.stride(1) else (length, 1)
        return cls(samples, length, *strides)

    def lay(self, x: Tensor) -> Tensor:
        """[b, t, ...] as contiguous rows: [b, t, ...] or [t, b, ...]."""
        return self.turn(x).contiguous()

    def turn(self, x: Tensor) -> Tensor:
        """[b, t, ...] as a view in the order of the rows, or back."""
        return x if self.time_stride == 1 else x.transpose(0, 1)
