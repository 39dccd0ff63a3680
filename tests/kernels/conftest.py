from __future__ import annotations

import importlib.util

import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    import fast_interpreter

    fast_interpreter.install()
