"""Detection of CUDA calls: each call is recorded with its location, and raises.

Detected calls are the functions of `torch.cuda`, `.cuda()`, pinned memory, and the lazy initialization of CUDA that any
tensor function with a CUDA device causes. Functions that only query for a GPU are allowed.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from parity import VOCABULARY, masked_batch, step_batches

from megatron_ext.checkpoint.folder import Progress
from megatron_ext.checkpoint.store import CheckpointStore
from megatron_ext.config.schema import RunConfig
from megatron_ext.model.shape import model_shape
from megatron_ext.parallel.groups import make_process_groups
from megatron_ext.platform import megatron_cpu
from megatron_ext.platform.device import select_platform
from megatron_ext.training.build import build_trainer

# Queries that the CPU build of torch supports, and the seeds, which torch.manual_seed itself passes to CUDA.
_ALLOWED = {"is_available", "device_count", "is_initialized", "is_bf16_supported", "manual_seed", "manual_seed_all"}


@contextmanager
def watched() -> Iterator[list[str]]:
    """Context manager in which calls to CUDA raise and are recorded as "function, called at file:line in name"."""
    calls: list[str] = []
    with ExitStack() as stack:
        for owner, name in _entry_points():
            watch = _watch(f"{getattr(owner, '__name__', owner)}.{name}", calls)
            stack.enter_context(mock.patch.object(owner, name, watch))
        yield calls


def _entry_points() -> list[tuple[Any, str]]:
    functions = [
        name
        for name, value in vars(torch.cuda).items()
        if isinstance(value, FunctionType) and not name.startswith("_") and name not in _ALLOWED
    ]
    classes = [name for name in ("Stream", "Event", "CUDAGraph", "stream") if hasattr(torch.cuda, name)]
    return [
        *((torch.cuda, name) for name in dict.fromkeys([*functions, *classes, "_lazy_init"])),
        (torch.Tensor, "cuda"),
        (torch.Tensor, "pin_memory"),
        (torch.nn.Module, "cuda"),
    ]


def _watch(what: str, calls: list[str]) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        # The caller is the innermost frame outside torch and this file.
        frames = [f for f in traceback.extract_stack() if f.filename != __file__ and "/torch/" not in f.filename]
        calls.append(f"{what}, called at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
        raise AssertionError(f"CUDA was asked for: {calls[-1]}")

    return call


def modules_without_the_proxy() -> list[str]:
    """Loaded modules of megatron.core that reference the real torch or torch.cuda instead of the proxy."""
    real = {id(torch): "torch", id(torch.cuda): "torch.cuda"}
    return [
        f"{name}.{attribute} is {real[id(value)]}"
        for name, module in sorted(sys.modules.items())
        if name.startswith("megatron.core") and module is not None
        for attribute, value in vars(module).items()
        if id(value) in real
    ]


def run_watched(rank: int, world_size: int, config: RunConfig, folder: Path) -> tuple[list[str], list[str], int]:
    """Train, evaluate, save, load and train again inside `watched`.

    Returns:
        The calls to CUDA, the modules without the proxy, and the number of modules of megatron.core that have it.
    """
    platform = select_platform("cpu")
    with watched() as calls:
        groups = make_process_groups(config.parallel, config.training.seed)
        trainer = build_trainer(config, model_shape(config, platform, VOCABULARY), groups, platform)
        result = trainer.train_step(step_batches(config, groups, 0))
        trainer.losses([masked_batch([0, 1], groups) for _ in range(2)])
        store = CheckpointStore(folder, {}, groups, platform)
        store.save(trainer.optimizer, Progress(step=1))
        store.load(trainer.optimizer, store.check(1))
        trainer.train_step(step_batches(config, groups, 1))
    assert result.loss > 0
    reached = sum(vars(m).get("torch") is megatron_cpu._proxy for n, m in sys.modules.items() if "megatron.core" in n)
    dist.barrier()
    return calls, modules_without_the_proxy(), reached
