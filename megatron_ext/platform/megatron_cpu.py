"""Adapter that runs megatron-core on CPU and gloo without changing torch for other code.

megatron-core names CUDA in its own modules: `torch.cuda.current_device()` as the device of new tensors,
`device="cuda"` literals, CUDA's generator state, streams, and comparisons such as
`param.type() == "torch.cuda.FloatTensor"`. The adapter rebinds the name `torch` in the modules of `megatron.core` to a
proxy, which implements these for the CPU and forwards everything else. Modules imported later are rebound on import.
Type comparisons call methods of tensors, which a proxy cannot replace: `tensor_types_as_cuda` wraps the few calls that
make them.

Nothing here has any effect where CUDA is used.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from megatron_ext.platform.adamw import AdamW

CPU = torch.device("cpu")
_PREFIX = "megatron.core"
_UNCOMPILED_ATTRIBUTE = "_torchdynamo_orig_callable"
"""Attribute in which torch.compile keeps the original function.

Megatron compiles small functions on import, which on the CPU takes a C++ compiler and up to 20 s per process.
"""
_COMPILING_MODULE = "megatron.core.transformer.moe.router"
"""Module that since 0.17 applies torch.compile to a method when it is imported.

That imports the compiler, which takes more than a second.
"""

_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like"),
    *("rand", "randint", "randn", "randperm", "tensor", "zeros", "zeros_like"),
)


class _NoStream:
    """Replacement for a CUDA stream or event: on the CPU operations run in order."""

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def record_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...


def _no_op(*_: object, **__: object) -> None:
    """Do nothing, in place of CUDA functions without meaning on the CPU."""


class _CpuCuda(types.ModuleType):
    """`torch.cuda` as seen by megatron.core."""

    Stream = staticmethod(lambda *_, **__: _NoStream())
    Event = staticmethod(lambda *_, **__: _NoStream())
    current_stream = default_stream = Stream
    stream = staticmethod(lambda *_: contextlib.nullcontext())
    current_device = staticmethod(lambda: CPU)
    device_count = staticmethod(lambda: 1)
    set_device = synchronize = empty_cache = staticmethod(_no_op)
    manual_seed = staticmethod(torch.manual_seed)

    @staticmethod
    def get_rng_state(device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """`torch` as seen by megatron.core."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a tensor factory so that any CUDA device (by name, index or object) means the CPU."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and (isinstance(device, int) or torch.device(device).type == "cuda"):
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return make


def _make_proxy() -> types.ModuleType:
    proxy = _CpuTorch("torch")
    proxy.cuda = _CpuCuda("torch.cuda")  # type: ignore[attr-defined]
    proxy.optim = types.ModuleType("torch.optim")  # type: ignore[attr-defined]
    vars(proxy.optim).update(vars(torch.optim), AdamW=AdamW)
    for name in _FACTORIES:
        setattr(proxy, name, _on_cpu(getattr(torch, name)))
    return proxy


_proxy: types.ModuleType | None = None


class _RebindingLoader(importlib.abc.Loader):
    """Loader that executes a module of megatron.core and then rebinds its `torch`."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        with _no_compiler() if module.__name__ == _COMPILING_MODULE else contextlib.nullcontext():
            self._loader.exec_module(module)
        _rebind(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


@contextlib.contextmanager
def _no_compiler() -> Iterator[None]:
    """Context manager under which `@torch.compile` returns the function itself."""
    compile_ = torch.compile
    torch.compile = lambda function, **_: function  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that intercepts later imports of megatron.core's modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(_PREFIX):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _RebindingLoader(spec.loader)
        return spec


def _rebind(module: types.ModuleType) -> None:
    if module.__dict__.get("torch") is torch:
        module.torch = _proxy  # type: ignore[attr-defined]
    for name, value in list(vars(module).items()):
        if isinstance(value, types.FunctionType) and hasattr(value, _UNCOMPILED_ATTRIBUTE):
            setattr(module, name, getattr(value, _UNCOMPILED_ATTRIBUTE))
    adapt = _ADAPTERS.get(module.__name__)
    if adapt is not None:
        adapt(module)


def _l2_norm(_chunk: int, _overflow: object, tensor_lists: list[list[torch.Tensor]], *_: object) -> tuple[Any, None]:
    """Compute the norm of all tensors together, accumulated in float64.

    torch.norm on the CPU accumulates sequentially in fp32. For a million gradients its error is 2e-5, and differs
    between layouts.
    """
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensors in tensor_lists for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)).float().reshape(1), None


def _use_cpu_generator(random: Any) -> None:
    """Make Megatron's tracker of generator states keep states of the CPU's generator.

    Its own `fork` warns if the CPU generator changes inside, but here that is the generator to fork.
    """

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer_state = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer_state)

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    random.CudaRNGStatesTracker = CpuRNGStatesTracker


def _use_torch_adamw(optimizer: Any) -> None:
    """Select torch's optimizers. Megatron prefers Transformer Engine's or apex's fused ones, which need a GPU."""
    optimizer.Adam, optimizer.SGD, optimizer.USING_PYTORCH_OPTIMIZER = AdamW, torch.optim.SGD, True


def _expect_torch_adamw(distrib_optimizer: Any) -> None:
    distrib_optimizer.HAVE_APEX_OR_TE = False
    distrib_optimizer.USING_TE_OPTIMIZER = distrib_optimizer.USING_APEX_OPTIMIZER = False


def _clip_on_cpu(clip_grads: Any) -> None:
    from megatron.core import utils

    clip_grads.l2_norm_impl = _l2_norm
    clip_grads.multi_tensor_applier = utils.local_multi_tensor_applier
    clip_grads.multi_tensor_scale_impl = utils.local_multi_tensor_scale
    # megatron-core 0.17 and later: otherwise the norm would stay a tensor, and clipping would call a CUDA kernel.
    clip_grads.multi_tensor_scale_tensor_impl = None


_ADAPTERS: dict[str, Callable[[Any], None]] = {
    "megatron.core.jit": lambda jit: jit.disable_jit_fuser(),
    "megatron.core.tensor_parallel.random": _use_cpu_generator,
    "megatron.core.optimizer": _use_torch_adamw,
    "megatron.core.optimizer.distrib_optimizer": _expect_torch_adamw,
    "megatron.core.optimizer.clip_grads": _clip_on_cpu,
}


def install() -> None:
    """Rebind `torch` in every module of megatron.core, imported already or later. Idempotent."""
    global _proxy
    if _proxy is not None:
        return
    _proxy = _make_proxy()
    sys.meta_path.insert(0, _Finder())
    for name, module in list(sys.modules.items()):
        if name.startswith(_PREFIX) and module is not None:
            _rebind(module)


def is_installed() -> bool:
    """Return whether this adapter runs megatron.core on the CPU."""
    return _proxy is not None


@contextlib.contextmanager
def tensor_types_as_cuda() -> Iterator[None]:
    """Context manager under which CPU tensors report CUDA types, and `.cuda()` returns them unchanged.

    Megatron's optimizers compare `Tensor.type()` with `torch.cuda.*` when they are built, stepped, saved and loaded.
    Its tied embedding calls `.cuda()` when pipeline stages are built. No effect unless the adapter is installed.
    """
    if not is_installed():
        yield
        return
    type_, cuda = torch.Tensor.type, torch.Tensor.cuda

    def cuda_type(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = type_(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = cuda_type  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.type, torch.Tensor.cuda = type_, cuda  # type: ignore[method-assign]
