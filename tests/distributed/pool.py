"""Pool of processes, started once per test session, that run a function as the ranks of a process group.

This module imports neither torch nor Megatron. The fork server imports them once for all pools of a session, which
would otherwise take most of a case's time.
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
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
_REPOSITORY = Path(__file__).parents[2]

# CPU tests stay on the CPU on a GPU machine. One thread per process, because several processes share the cores.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # The repository comes before the PYTHONPATH of the tests, because Selectron need not be installed. This folder
    # contains `prepared_import`. The fork server of Python 3.11 does not inherit the parent's sys.path.
    "PYTHONPATH": os.pathsep.join(filter(None, [str(_REPOSITORY), str(_HERE), os.environ.get("PYTHONPATH")])),
    # Megatron passes small functions to torch.compile. On the CPU its import takes as long as that of torch, and
    # compiling one function in every process takes longer than most cases.
    "TORCHDYNAMO_DISABLE": "1",
}
# Modules that the fork server imports. None of them starts a thread at import, which would not survive the fork.
_PRELOADED = [
    "prepared_import",
    *("megatron_ext.training.build", "megatron_ext.optim.zero1", "megatron_ext.optim.zero23"),
    *("megatron_ext.config.derive", "megatron_ext.config.rules", "megatron_ext.checkpoint.store"),
    # Imported by `load_all`, which nearly every function calls.
    *(
        f"megatron_ext.mixers.{file.stem}"
        for file in sorted((_REPOSITORY / "megatron_ext" / "mixers").glob("[!_]*.py"))
    ),
]


class WorkerFailed(AssertionError):
    """Error of a worker that raised, died or did not answer in time. The message contains its traceback."""


class WorkerPool:
    """Pool of worker processes. After a failure all are killed, and the next call starts new ones.

    Args:
        size: largest world size.
    """

    patience = 2.0
    """Seconds that an idle worker has to exit before it is killed."""

    grace = 5.0
    """Seconds that the other ranks have to answer after one has failed."""

    max_calls = 80
    """Number of calls after which workers are replaced. A heap was once found corrupted in a process that had trained
    hundreds of models, which no command does, and never in another process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls = 0
        atexit.register(self.stop)
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300.0) -> list[Any]:
        """Call `function(rank, world_size, *args)` on the first `world_size` workers, inside a gloo process group.

        Args:
            function: a function of a module (pickled by name).
            world_size: number of processes.
            args: further arguments, picklable.
            timeout: seconds until a hanging call is aborted.

        Returns:
            The return value of each rank.

        Raises:
            WorkerFailed: one of them raised, died or did not answer.
        """
        if self._calls == self.max_calls:
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
        """End the workers and their child processes. Idle workers exit by themselves, others are killed."""
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(self.patience)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._workers, self._calls = [], 0

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            process = start_process(_serve, theirs, name=f"worker {rank}")
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
                    # The other ranks may hang without this one. They may also report further errors.
                    deadline = min(deadline, time.monotonic() + self.grace)
        if failures:
            raise WorkerFailed("\n".join(failures))
        return [results[rank] for rank in range(world_size)]


def start_process(function: Callable[..., Any], *args: Any, name: str | None = None, daemon: bool = False) -> Any:
    """Start a process that calls a function. It is forked from a server without threads that has imported Megatron.

    Args:
        function: a function of a module (pickled by name).
        args: arguments of the function, picklable.
        name: name of the process.
        daemon: end the process with this one. A daemon cannot save checkpoints, which starts child processes.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _environment(ENVIRONMENT):  # the first call starts the fork server, whose environment all processes inherit
        process = context.Process(target=_call_preloaded, args=(_PRELOADED, function, *args), name=name, daemon=daemon)
        process.start()
    return process


def _call_preloaded(modules: list[str], function: Callable[..., Any], *args: Any) -> None:
    # The fork server ignores a module that it cannot import. Here the import fails again, visibly.
    for module in modules:
        import_module(module)
    function(*args)


def _receive(connection: Connection, stack: Path) -> tuple[bool, Any]:
    try:
        return pickle.loads(connection.recv_bytes())
    except EOFError:
        return False, f"died\n{stack.read_text() if stack.exists() else ''}"


def _stack_file(folder: Path, rank: int) -> Path:
    """File that receives the stack of a worker killed by a signal."""
    return folder / f"stack_{rank}"


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Context manager that sets environment variables for processes started inside."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(connection: Connection) -> None:
    """Main loop of a worker: execute calls until the pool is gone."""
    os.setpgrp()  # so that `stop` can kill the worker with its child processes
    gc.freeze()  # imported objects live on; collecting over them after every call would take longer than the call
    while True:
        try:
            function, rank, world_size, store, timeout, args = connection.recv()
        except EOFError:
            return
        _reset_deepspeed_counters()
        try:
            with _stack_kept(_stack_file(store.parent, rank)), _process_group(rank, world_size, store, timeout):
                answer = pickle.dumps((True, function(rank, world_size, *args)))
        except BaseException:
            answer = pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
        connection.send_bytes(answer)


def _reset_deepspeed_counters() -> None:
    """Reset DeepSpeed's numbering of parameters and modules.

    Ranks compare these numbers. They differ when an earlier call built a model on some of the ranks only.
    """
    if "deepspeed" in sys.modules:
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.runtime.zero.partition_parameters import Init

        Init.param_id = 0
        DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0


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
    """Context manager with a new gloo group. On exit it destroys this group and Megatron's groups."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megatron_ext.parallel.groups import destroy_process_groups

    torch.set_num_threads(1)
    store_ = dist.FileStore(str(store), world_size)
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world_size)})  # as a launcher sets them
    dist.init_process_group("gloo", store=store_, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))
    try:
        yield
        dist.barrier()  # no rank leaves while another still connects to it or reads from it
    finally:
        if "deepspeed" in sys.modules:
            _forget_deepspeed()
        destroy_process_groups()
        dist.destroy_process_group()
        _forget_models()


def _forget_models() -> None:
    """Free objects that hold process groups. Each gloo group has a few polling threads, soon thousands."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    RotaryEmbedding.forward.cache_clear()  # the cache holds modules with their groups
    for thing in gc.get_objects():
        if type(thing) is DistributedDataParallel:
            # Hooks on autograd nodes form a cycle that the collector cannot see. Clearing their dictionary breaks it.
            for node in thing.grad_accs:
                node.register_hook(lambda *_: None).hooks_dict_ref().clear()
    gc.collect()


def _forget_deepspeed() -> None:
    """Remove DeepSpeed's hooks on parameters, groups in modules, and parameter names kept for its messages."""
    import deepspeed
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    kinds = (DeepSpeedEngine, ZeROOptimizer)
    found = [thing for thing in gc.get_objects() if issubclass(type(thing), kinds) and vars(thing)]
    engines = [thing for thing in found if isinstance(thing, DeepSpeedEngine)]
    for thing in found:
        if all(thing is not engine.optimizer for engine in engines):  # an engine destroys its own optimizer
            thing.destroy()
    # ZeRO-3's hooks and methods on modules and parameters form cycles that the collector cannot see.
    modules = [module for engine in engines for module in engine.module.modules()]
    parameters = [parameter for engine in engines for parameter in engine.module.parameters()]
    for engine in engines:
        engine.module.config.finalize_model_grads_func = None
    for parameter in parameters:
        (parameter._backward_hooks or {}).clear()  # Selectron's own hooks, which reduce over a group
    for thing in [*parameters, *modules, *found]:
        vars(thing).clear()
    deepspeed.utils.debug.debug_clear_module_and_param_names()
    deepspeed.comm.comm.cdb = groups.mpu = None
