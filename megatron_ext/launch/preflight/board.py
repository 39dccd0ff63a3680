"""Communication of the pre-flight processes: orders of the first one and the others' answers, through a store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]


class Silence(Exception):
    """Nothing arrived within the time limit."""


class Board:
    """Connection of a process to the store of the first process.

    Args:
        seconds: time limit for reaching the first process.

    Raises:
        Silence: the first process cannot be reached.
    """

    def __init__(self, seconds: float) -> None:
        self.rank = int(os.environ["RANK"])
        serves = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = self._connect(seconds, serves)
        self._numbers: dict[int, int] = {}

    def _connect(self, seconds: float, serves: bool = False) -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=seconds)
        try:
            return TCPStore(host, port, is_master=serves, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise Silence(f"{host}:{port} does not answer within {seconds:.0f} s") from error

    def put(self, key: str, what: Any) -> None:
        """Store a value as JSON."""
        self._store.set(key, json.dumps(what))

    def take(self, key: str, seconds: float) -> Any:
        """Wait for a value and return it.

        Raises:
            Silence: it did not arrive.
        """
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise Silence(f"no {key} within {seconds:.0f} s") from error
        return json.loads(self._store.get(key))

    def gather(self, keys: Mapping[int, str], seconds: float) -> dict[int, Any]:
        """Return the values that arrive from the ranks within the time limit."""
        end = time.monotonic() + seconds
        there = {}
        for rank, key in keys.items():
            with suppress(Silence):
                there[rank] = self.take(key, end - time.monotonic())
        return there

    def order(self, orders: Mapping[int, Any]) -> dict[int, str]:
        """Send the next order to ranks and return the keys of their answers."""
        keys = {}
        for rank, what in orders.items():
            number = self._numbers[rank] = self._numbers.get(rank, -1) + 1
            self.put(f"order/{rank}/{number}", what)
            keys[rank] = f"answer/{rank}/{number}"
        return keys

    def orders(self, seconds: float) -> Iterable[tuple[Any, str]]:
        """Yield the orders of this rank as they arrive, each with the key of its answer.

        Args:
            seconds: time limit for each order.

        Raises:
            Silence: none arrived in time.
        """
        number = 0
        while True:
            yield self.take(f"order/{self.rank}/{number}", seconds), f"answer/{self.rank}/{number}"
            number += 1

    def part(self, name: str, seconds: float) -> Store:
        """Return a part of the store for a group, over its own connection: a hanging call there blocks no other.

        Raises:
            Silence: the store does not respond.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(name, self._connect(seconds))
