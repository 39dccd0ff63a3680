"""Differences between the supported versions of megatron-core.

Each function names the version that introduced the difference. It tests for the feature instead of the version number,
so that builds from source work, too.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.mlp import MLPSubmodules
    from torch.nn import Module

SUPPORTED = ">=0.16.1,<0.20"
"""Versions that may be installed; the same range as in pyproject.toml. Versions from 0.17 need Python 3.12."""


def mlp_spec(linear_fc1: type, linear_fc2: type) -> Any:
    """Return the spec of a layer's feed-forward network.

    Since 0.18 the spec is a function that builds the network. A layer still accepts a `ModuleSpec`, but replaces it in
    place and logs a warning.
    """
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    submodules = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    if hasattr(MLP, "as_mlp_submodule"):
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def mlp_submodules(spec: Any) -> MLPSubmodules:
    """Return the linear layers of a spec that `mlp_spec` returned."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules


def ddp_layout(module: Module, config: DistributedDataParallelConfig) -> dict[str, Any]:
    """Return the keyword arguments of `DistributedDataParallel` that give the layout of parameters in its buffers.

    There is one since 0.18, `full_param_layout`. Without it, DDP computes the same layout, but logs a warning if the
    optimizer is sharded.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    if (
        not config.use_distributed_optimizer
        or "full_param_layout" not in inspect.signature(DistributedDataParallel).parameters
    ):
        return {}
    bucket_size = None
    if config.overlap_grad_reduce and parallel_state.get_pipeline_model_parallel_rank() == 0:
        bucket_size = config.bucket_size or max(40_000_000, 1_000_000 * parallel_state.get_data_parallel_world_size())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    layout = DistributedOptimizer.compute_full_param_layout(trainable, bucket_size, group.size(), config)
    return {"full_param_layout": layout}


_IGNORED_MESSAGES = {
    # megatron-core 0.19 adds no features to the base class of our model.
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    # megatron-core 0.18 imports torch's builder of C++ extensions, even for a run on the CPU of a machine with CUDA.
    "torch.utils.cpp_extension": "No CUDA runtime is found",
}
"""First words of the message to ignore, by name of the logger."""


def ignore_log_messages() -> None:
    """Drop log messages that megatron-core causes in every run and that users cannot act on."""
    for logger, start in _IGNORED_MESSAGES.items():
        logging.getLogger(logger).addFilter(functools.partial(_starts_differently, start))


def _starts_differently(start: str, record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(start)
