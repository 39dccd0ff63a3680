"""Where there is no GPU, Triton kernels run in Triton's interpreter."""

import os

import torch

# Triton reads this when a kernel is defined, so it is set before any test imports one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
