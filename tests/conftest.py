from __future__ import annotations

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this when it is imported, which other libraries
# do, too: so it is set before any test is read.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Begun in the background by a script, pytest ignores SIGINT, under nohup SIGHUP, and so would every command that a test
# starts and ends. A handler of our own is not passed on; being ignored is.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# The pool of processes is a module of the distributed tests, which need not be among those that are run.
sys.path.append(str(Path(__file__).parent / "distributed"))
# Where the programs, started by hand, find what they share.
sys.path.append(str(Path(__file__).parents[1] / "tools"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what they import stay to the end: garbage is looked for in them neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes minutes: begun last, it would run while the other workers have nothing left to do.

    Each worker collects for itself, and all must find the same names. A set in a name, which each process writes in an
    order of its own, would end the whole run in most cases and pass in a few; a process's number would always end it.
    """
    own = re.compile(rf"(?<!\d){os.getpid()}(?!\d)")
    for item in items:
        if SET_IN_NAME.search(item.name):
            raise pytest.UsageError(f"{item.nodeid}: a set has no order to be a name; give a tuple, or ids of its own")
        if os.getpid() > 2048 and own.search(item.name):
            raise pytest.UsageError(f"{item.nodeid}: names this process's number; give ids of its own")
    items.sort(key=lambda item: item.name != "test_every_kernel_compiles")


SET_IN_NAME = re.compile(r"(?<!\w)(frozenset\(|set\(\)|\{'[^:{}]*\})")


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Release what a module's trainings in this process hold, and their threads, after its last test."""
    from left_behind import has_many_threads, release_models

    yield
    if has_many_threads():
        release_models()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small prepared folder, not to be written to."""
    from corpora import prepared

    return prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def own_data(tmp_path: Path, data: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(data, tmp_path / "data"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Four processes for the whole session that work together as the ranks of a group."""
    from pool import WorkerPool

    workers = WorkerPool(4)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def one_process() -> Iterator[Any]:
    """Megatron's process groups for this one process, on the CPU. Megatron is imported only where asked for."""
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
