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

from megatron_ext.platform.device import prepare_megatron_import

# Without a GPU, Triton's kernels run in its interpreter. Triton reads this variable when it is imported, and other
# libraries import it too. So set it before any test is collected.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Each worker collects all tests, and so pays for what test modules import. As in commands, prepare megatron-core before
# its import, which on the CPU then imports no compiler. hypothesis would import all of trio, which comes with selenium.
prepare_megatron_import()
os.environ.setdefault("HYPOTHESIS_NO_PLUGINS", "1")

# A script that starts pytest in the background makes it ignore SIGINT; nohup makes it ignore SIGHUP. Child processes
# inherit ignored signals but not handlers, so without this the commands that tests start could not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# The fixture `pool` imports a module from tests/distributed, even if no test of that folder is collected.
sys.path.append(str(Path(__file__).parent / "distributed"))
# The programs in tools import each other from their own folder, as when started by hand.
sys.path.append(str(Path(__file__).parents[1] / "tools"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude tests and imported modules from garbage collection: they live to the end of the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the test that takes minutes, so that it does not run last while the other workers are idle.

    Each worker collects the tests by itself, and all workers must find the same names. A set in a test's name is
    printed in a different order by each process, which makes most runs fail and a few pass. A process id always fails.
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
    """Release models and threads that a module's training runs hold in this process, after the module's last test."""
    from left_behind import has_many_threads, release_models

    yield
    if has_many_threads():
        release_models()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small prepared data folder. Tests must not write to it."""
    from corpora import prepared

    return prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def own_data(tmp_path: Path, data: Path) -> Path:
    """Copy of the prepared data that a test may damage."""
    return Path(shutil.copytree(data, tmp_path / "data"))


@pytest.fixture(scope="session")
def pool() -> Iterator[Any]:
    """Pool of four processes, kept for the session, that run functions as the ranks of a process group."""
    from pool import WorkerPool

    workers = WorkerPool(4)
    yield workers
    workers.stop()


@pytest.fixture(scope="module")
def one_process() -> Iterator[Any]:
    """Megatron process groups of this single process, on the CPU. Megatron is imported only by tests that use them."""
    import torch.distributed as dist

    if torch.cuda.is_available():
        pytest.skip("megatron-core puts its tensors on the GPU it sees; run with CUDA_VISIBLE_DEVICES= ")
    from megatron_ext.config.schema import ParallelConfig
    from megatron_ext.parallel.groups import destroy_process_groups, make_process_groups
    from megatron_ext.platform.device import select_platform

    select_platform("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield make_process_groups(ParallelConfig(), seed=1)
    destroy_process_groups()
    dist.destroy_process_group()
