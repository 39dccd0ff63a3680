"""A few processes, started once a test session, that run a function together as the ranks of one process group.

Imports neither torch nor Megatron itself: the server does that forks the workers, once for all pools of a session, and
that is most of what a case would cost.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# CPU tests on a GPU machine stay CPU tests; one thread a process, as every process has the others beside it.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # Before whatever the tests themselves are run with: there may be no installed environment besides.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),
    # Megatron hands functions of a line to torch.compile. On the CPU importing it takes as long as torch itself, and
    # compiling one, in every process, longer than most cases.
    "TORCHDYNAMO_DISABLE": "1",
}
# None of them starts a thread when it is imported: forking would leave it behind.
_IMPORTED_ONCE = ["megatron_ext.training.build", "megatron_ext.optim.zero1", "megatron_ext.optim.zero23"]


class WorkerFailed(AssertionError):
    """A worker raised, died or did not answer in time. The message holds its traceback."""


class WorkerPool:
    """Workers that wait for work. After a failure all are killed, and the next call starts fresh ones.

    Args:
        size: largest world size.
    """

    patience = 2.0
    """Seconds in which an idle worker may end before it is killed."""

    life = 30
    """Calls after which workers are replaced. Nobody trains hundreds of models, one after the other, in one process:
    a heap was once found corrupted in one that had, and nowhere else. Starting one takes half a second."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls = 0
        atexit.register(self.stop)
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call `function(rank, world_size, *args)` on the first `world_size` workers, inside a gloo process group.

        Args:
            function: a function of a module (pickled by name).
            world_size: how many processes.
            args: picklable.
            timeout: seconds until a call that hangs is given up.

        Returns:
            What each rank returned.

        Raises:
            WorkerFailed: one of them raised, died or did not answer.
        """
        if self._calls == self.life:
            self.stop()
        if not self._workers:
            self._start()
        self._calls += 1
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, connection) in enumerate(self._workers[:world_size]):
                connection.send((function, rank, world_size, Path(folder) / "store", timeout, args))
            try:
                return self._collect(world_size, time.monotonic() + timeout, Path(folder))
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """End the workers of this pool and what they started, and only those; idle ones end by themselves."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(self.patience)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._workers, self._calls = [], 0

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED_ONCE)
        with _environment(ENVIRONMENT):  # the server's, which the first pool starts, and through it the workers'
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                # Not daemons: saving a checkpoint starts processes of its own.
                process = context.Process(target=_serve, args=(theirs,), name=f"worker {rank}")
                process.start()
                theirs.close()
                self._workers.append((process, ours))

    def _collect(self, world_size: int, deadline: float, folder: Path) -> list[Any]:
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world_size])}
        results: dict[int, Any] = {}
        failures: list[str] = []
        while waiting := [connection for connection, rank in ranks.items() if rank not in results]:
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.append(f"rank(s) {[ranks[c] for c in waiting]} did not answer in time")
                break
            for connection in ready:
                rank = ranks[connection]  # type: ignore[index]
                ok, results[rank] = _receive(connection, _stack_file(folder, rank))  # type: ignore[arg-type]
                if not ok:
                    failures.append(f"rank {rank} {results[rank]}")
                    # The others may hang for want of this one, or say more about what happened.
                    deadline = min(deadline, time.monotonic() + 5.0)
        if failures:
            raise WorkerFailed("\n".join(failures))
        return [results[rank] for rank in range(world_size)]


def _receive(connection: Connection, stack: Path) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return False, f"died\n{stack.read_text() if stack.exists() else ''}"


def _stack_file(folder: Path, rank: int) -> Path:
    """Where a worker that a signal ends says what it was doing."""
    return folder / f"stack_{rank}"


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection) -> None:
    """What a worker does until it is killed or its pool is gone."""
    os.setpgrp()  # so that it can be ended with all it started
    gc.freeze()  # what imports made stays; looking through it after every call would take longer than the call
    while True:
        try:
            function, rank, world_size, store, timeout, args = connection.recv()
        except EOFError:
            return
        try:
            with _stack_kept(_stack_file(store.parent, rank)), _process_group(rank, world_size, store, timeout):
                answer = pickle.dumps((True, function(rank, world_size, *args)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        connection.send_bytes(answer)


@contextmanager
def _stack_kept(file: Path) -> Iterator[None]:
    with file.open("w") as stream:
        faulthandler.enable(stream)
        try:
            yield
        finally:
            faulthandler.disable()


@contextmanager
def _process_group(rank: int, world_size: int, store: Path, timeout: float) -> Iterator[None]:
    """A fresh gloo group, and afterwards neither it nor Megatron's groups."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megatron_ext.parallel.groups import destroy_process_groups

    torch.set_num_threads(1)
    store_ = dist.FileStore(str(store), world_size)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size)})  # as a launcher says it
    dist.init_process_group("gloo", store=store_, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        yield
        dist.barrier()  # none leaves while another still connects to it or reads from it
    finally:
        if "deepspeed" in sys.modules:
            _forget_deepspeed()
        destroy_process_groups()
        dist.destroy_process_group()
        _forget_models()


def _forget_models() -> None:
    """Free what still holds process groups: every gloo group is a few polling threads, soon thousands."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # of the modules themselves, with their groups
    for thing in gc.get_objects():
        if type(thing) is DistributedDataParallel:
            # A cycle through hooks on autograd's nodes, which the collector cannot see: their dictionary is emptied.
            for node in thing.grad_accs:
                node.register_hook(lambda *_: None).hooks_dict_ref().clear()
    gc.collect()


def _forget_deepspeed() -> None:
    """DeepSpeed keeps hooks on parameters, groups in modules, and names of parameters for its messages."""
    import deepspeed
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    kinds = (DeepSpeedEngine, ZeROOptimizer)
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds) and vars(thing)]
    engines = [thing for thing in found if isinstance(thing, DeepSpeedEngine)]
    for thing in found:
        if all(thing is not engine.optimizer for engine in engines):  # those an engine ends itself
            thing.destroy()
    # ZeRO-3's hooks and methods on modules and parameters are part of cycles that the collector cannot see.
    modules = [module for engine in engines for module in engine.module.modules()]
    parameters = [parameter for engine in engines for parameter in engine.module.parameters()]
    for engine in engines:
        engine.module.config.finalize_model_grads_func = None
    for parameter in parameters:
        (parameter._backward_hooks or {}).clear()  # our own, which sum over a group
    for thing in [*parameters, *modules, *found]:
        vars(thing).clear()
    deepspeed.utils.debug.debug_clear_module_and_param_names()
    deepspeed.comm.comm.cdb = groups.mpu = None
