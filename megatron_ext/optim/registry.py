"""Registry of optimizer algorithms by name. Each file of `algorithms/` registers its own; `load_all` imports them."""

from __future__ import annotations

from collections.abc import Callable

import megatron_ext.optim.algorithms
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.config.suggest import suggest
from megatron_ext.optim.algorithm import Algorithm
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.registration import add_entry, import_modules

ALGORITHMS: dict[str, type[Algorithm]] = {}


def register(name: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Return a class decorator that registers an algorithm under a name, a value of `optimizer.name`.

    Raises:
        ValueError: the name is taken (raised by the decorator).
    """

    def add(algorithm: type[Algorithm]) -> type[Algorithm]:
        add_entry(ALGORITHMS, name, algorithm, "optimizers")
        return algorithm

    return add


def load_all() -> dict[str, type[Algorithm]]:
    """Import every module of `algorithms`, so that each algorithm registers itself, and return them by name."""
    import_modules(megatron_ext.optim.algorithms)
    return ALGORITHMS


def algorithm_of(config: OptimizerConfig) -> Algorithm:
    """Return the algorithm of a configuration.

    Raises:
        UserError: the name is unknown, or the algorithm does not support the sharding.
    """
    known = load_all()
    if config.name not in known:
        raise UserError(
            "optimizer.name", f"no optimizer is called {config.name!r}", suggest(config.name, sorted(known))
        )
    algorithm = known[config.name]()
    if config.sharding not in algorithm.shardings:
        problem = f"{config.sharding}, which optimizer.name {config.name} does not support"
        raise UserError("optimizer.sharding", problem, f"choose from: {', '.join(algorithm.shardings)}")
    return algorithm
