"""Communication of the pre-flight processes through a store: the first process sends orders, the others answer."""

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


class NoResponse(Exception):
    """Nothing arrived within the time limit."""


class Board:
    """Connection of a process to the store of the first process.

    Args:
        seconds: time limit for reaching the first process.

    Raises:
        NoResponse: the first process cannot be reached.
    """

    def __init__(self, seconds: float) -> None:
        self.rank = int(os.environ["RANK"])
        is_server = self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._store = self._connect(seconds, is_server)
        self._order_numbers: dict[int, int] = {}

    def _connect(self, seconds: float, is_server: bool = False) -> Store:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        limit = timedelta(seconds=seconds)
        try:
            return TCPStore(host, port, is_master=is_server, timeout=limit, wait_for_workers=False)
        except RuntimeError as error:
            raise NoResponse(f"{host}:{port} does not answer within {seconds:.0f} s") from error

    def put(self, key: str, value: Any) -> None:
        """Store a value as JSON."""
        self._store.set(key, json.dumps(value))

    def wait_for(self, key: str, seconds: float) -> Any:
        """Wait for a value and return it.

        Raises:
            NoResponse: the value did not arrive within `seconds`.
        """
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except RuntimeError as error:
            raise NoResponse(f"no {key} within {seconds:.0f} s") from error
        return json.loads(self._store.get(key))

    def gather(self, keys: Mapping[int, str], seconds: float) -> dict[int, Any]:
        """Return by rank the values of `keys` that arrive within `seconds` in total."""
        deadline = time.monotonic() + seconds
        values = {}
        for rank, key in keys.items():
            with suppress(NoResponse):
                values[rank] = self.wait_for(key, deadline - time.monotonic())
        return values

    def order(self, orders: Mapping[int, Any]) -> dict[int, str]:
        """Send an order to each rank in `orders`, and return by rank the keys of the answers."""
        keys = {}
        for rank, order in orders.items():
            number = self._order_numbers[rank] = self._order_numbers.get(rank, -1) + 1
            self.put(f"order/{rank}/{number}", order)
            keys[rank] = f"answer/{rank}/{number}"
        return keys

    def orders(self, seconds: float) -> Iterable[tuple[Any, str]]:
        """Yield the orders of this rank as they arrive, each with the key of its answer.

        Args:
            seconds: time limit for each order.

        Raises:
            NoResponse: no order arrived within `seconds`.
        """
        number = 0
        while True:
            yield self.wait_for(f"order/{self.rank}/{number}", seconds), f"answer/{self.rank}/{number}"
            number += 1

    def open_view(self, name: str, seconds: float) -> Store:
        """Return a view of the store with keys prefixed by `name`, over a separate connection.

        A hanging call on this connection blocks no other connection.

        Raises:
            NoResponse: the store does not respond.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        return PrefixStore(name, self._connect(seconds))
