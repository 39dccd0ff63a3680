from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

# Begun in the background by a script, pytest ignores SIGINT, and so would every command that a test starts and
# interrupts. A handler of our own is not passed on; being ignored is.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def one_process() -> Iterator[Any]:
    """Megatron's process groups for this one process, on the CPU (torch is imported only where this is asked for)."""
    import torch
    import torch.distributed as dist

    if torch.cuda.is_available():
        pytest.skip("megatron-core puts its tensors on the GPU it sees; run with CUDA_VISIBLE_DEVICES= ")
    from megatron_ext.config.schema import ParallelConfig
    from megatron_ext.parallel.groups import destroy_process_groups, make_process_groups
    from megatron_ext.platform import select_platform

    select_platform("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_process_groups(ParallelConfig(), seed=1)
    destroy_process_groups()
    dist.destroy_process_group()
