"""Restricted reader of pickles: plain values, and classes from an exact list of names.

A pickle is a program. This interpreter only supports the opcodes for plain values and data classes. It imports nothing.
Names are looked up in a table by their exact (module, name) pair. Only functions of that table are called, and only
they set attributes. The amount of data read is bounded by the size of the file.
"""

from __future__ import annotations

import struct
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.checkpoint.extent import RefusedPickle, check_extent

_MAX_NAME = 200
_MAX_KEY = 64
"""Most elements of a tuple used as a key, because its hash is recomputed at every use."""
_MOST_COMPARISONS = 20_000_000
"""Most comparisons of keys with hashes under an author's control. Each takes up to 30 ns."""
_FEW_KEYS = 1024
_SCALARS = (str, int, float, bool, bytes, type(None))


@dataclass(frozen=True, eq=False)
class Name:
    """Class that a pickle may name.

    Attributes:
        call: builds a value from the pickle's arguments. None: it may not be called.
        new: builds an empty instance for `fill`. None: not allowed.
        kind: type of the instances that `fill` accepts.
        fill: validates a state and stores it in an instance.
    """

    call: Callable[..., Any] | None = None
    new: Callable[[], Any] | None = None
    kind: type | None = None
    fill: Callable[[Any, Any], None] | None = None


Names = Mapping[tuple[str, str], Any]
"""Allowed names by (module, name): a `Name`, or a constant that is used as it is."""


class Unread:
    """Empty stand-in for an instance whose content is ignored."""


def unread() -> Name:
    """Return an entry for a class whose arguments and state are ignored."""
    return Name(lambda *_: Unread(), Unread, Unread, lambda instance, state: None)


def ordered() -> Name:
    """Return an entry for `OrderedDict`. Items are set one by one: its constructor would hash unchecked keys."""

    def empty() -> OrderedDict[Any, Any]:
        return OrderedDict()

    return Name(empty, None, OrderedDict, lambda instance, state: None)


def namespace() -> Name:
    """Return an entry for `argparse.Namespace` whose attribute names are identifiers."""

    def fill(instance: Namespace, state: Any) -> None:
        if type(state) is not dict or not all(type(key) is str and key.isidentifier() for key in state):
            raise RefusedPickle("a Namespace has names that are none")
        vars(instance).update(state)

    return Name(Namespace, Namespace, Namespace, fill)


def load(data: bytes, names: Names, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read a pickle of protocol 2 to 5.

    Args:
        data: the pickle.
        names: classes that it may name.
        persistent: returns the object of a persistent id. None: persistent ids are refused.

    Raises:
        RefusedPickle: the pickle is damaged, contains anything else, or its value is too deep or too large (see
            `check_extent`).
    """
    try:
        value = _Machine(data, names, persistent).run()
        check_extent(value, {name.kind for name in names.values() if isinstance(name, Name) and name.kind is not None})
        return value
    except RefusedPickle:
        raise
    except Exception as error:
        text = "".join(c if c.isprintable() else "?" for c in str(error))[:_MAX_NAME]
        raise RefusedPickle(f"is not a readable pickle ({type(error).__name__}: {text})") from error


class _Machine:
    def __init__(self, data: bytes, names: Names, persistent: Callable[[Any], Any] | None) -> None:
        self._data, self._names, self._persistent = data, names, persistent
        self._fillers = {n.kind: n.fill for n in names.values() if isinstance(n, Name) and n.kind is not None}
        self._at = 0
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._bytes_of_calls = 0
        self._comparisons = 0
        self._hashes: dict[int, set[int]] = {}  # by id of a dictionary: hashes of its keys that are instances

    def run(self) -> Any:
        data, stop = self._data, ord(".")
        operations = {code: getattr(self, name) for code, name in _OPERATIONS.items()}
        while True:
            code = data[self._at]
            self._at += 1
            if code == stop:
                break
            operation = operations.get(code)
            if operation is None:
                raise RefusedPickle(f"has the opcode {bytes([code])!r}, which no plain value needs")
            operation()
        if self._outer or len(self._stack) != 1:
            raise RefusedPickle("does not end with one value")
        return self._stack[0]

    # --- what is read ------------------------------------------------------------------------------------------------

    def _bytes(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise RefusedPickle(f"ends within a value of {count} bytes")
        found = self._data[self._at : end]
        self._at = end
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _line(self) -> str:
        end = self._data.index(b"\n", self._at, self._at + _MAX_NAME + 1)
        line = self._data[self._at : end].decode()
        self._at = end + 1
        return line

    def proto(self) -> None:
        if not 2 <= self._byte() <= 5:
            raise RefusedPickle("has an unsupported protocol")

    def frame(self) -> None:
        self._bytes(8)

    # --- plain values ------------------------------------------------------------------------------------------------

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int1(self) -> None:
        self._stack.append(self._byte())

    def int2(self) -> None:
        self._stack.append(self._number("<H"))

    def int4(self) -> None:
        self._stack.append(self._number("<i"))

    def long1(self) -> None:
        self._stack.append(int.from_bytes(self._bytes(self._byte()), "little", signed=True))

    def float8(self) -> None:
        self._stack.append(self._number(">d"))

    def text1(self) -> None:
        self._stack.append(self._bytes(self._byte()).decode("utf-8", "surrogatepass"))

    def text4(self) -> None:
        self._stack.append(self._bytes(self._number("<I")).decode("utf-8", "surrogatepass"))

    def text8(self) -> None:
        self._stack.append(self._bytes(self._number("<Q")).decode("utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self._stack.append(self._bytes(self._byte()))

    def bytes4(self) -> None:
        self._stack.append(self._bytes(self._number("<I")))

    def bytes8(self) -> None:
        self._stack.append(self._bytes(self._number("<Q")))

    # --- containers --------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        self._outer.append(self._stack)
        self._stack = []

    def _marked(self) -> list[Any]:
        found, self._stack = self._stack, self._outer.pop()
        return found

    def empty_tuple(self) -> None:
        self._stack.append(())

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_dict(self) -> None:
        self._stack.append({})

    def tuple_(self) -> None:
        found = tuple(self._marked())
        self._stack.append(found)

    def tuple1(self) -> None:
        self._last(1)

    def tuple2(self) -> None:
        self._last(2)

    def tuple3(self) -> None:
        self._last(3)

    def _last(self, count: int) -> None:
        if len(self._stack) < count:
            raise RefusedPickle("pops more from its stack than it has pushed")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self._marked())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise RefusedPickle("appends to something that is not a list")
        self._stack[-1].extend(values)

    def item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def items(self) -> None:
        self._set(self._marked())

    def _set(self, pairs: list[Any]) -> None:
        into = self._stack[-1]
        if type(into) not in (dict, OrderedDict):
            raise RefusedPickle("sets items of something that is not a dictionary")
        if len(pairs) % 2:
            raise RefusedPickle("has a key without a value")
        for number in range(0, len(pairs), 2):
            key = pairs[number]
            # Hashing nested tuples recurses in C without a limit.
            if isinstance(key, tuple) and not (
                len(key) <= _MAX_KEY and all(isinstance(part, _SCALARS) for part in key)
            ):
                raise RefusedPickle("has a key that is not a plain value")
            self._count_comparisons(into, key)
            into[key] = pairs[number + 1]

    def _count_comparisons(self, into: Mapping[Any, Any], key: Any) -> None:
        """Bound the comparisons of a new key with earlier keys of the same hash.

        Hashes of strings cannot be chosen, because they are salted per process. Integers that count from 0 do not
        collide. The hash of an instance also depends on a string, but instances that share that string can be given
        equal hashes.

        Raises:
            RefusedPickle: there are too many comparisons.
        """
        kind = type(key)
        if kind in (str, bytes, bool, type(None)):
            return
        if kind is int and 0 <= key < 4 * len(into) + _FEW_KEYS:
            return
        if kind not in (int, float, tuple):
            known, found = self._hashes.setdefault(id(into), set()), hash(key)
            if found not in known:
                known.add(found)
                return
            self._comparisons += 15 * len(into)  # instances are compared in Python, which is slower
        self._comparisons += len(into)
        if self._comparisons > _MOST_COMPARISONS:
            raise RefusedPickle("has too many colliding numeric keys")

    # --- references --------------------------------------------------------------------------------------------------

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put1(self) -> None:
        self._memo[self._byte()] = self._stack[-1]

    def put4(self) -> None:
        number = self._number("<I")
        self._count_comparisons(self._memo, number)
        self._memo[number] = self._stack[-1]

    def get1(self) -> None:
        self._stack.append(self._memo[self._byte()])

    def get4(self) -> None:
        self._stack.append(self._memo[self._number("<I")])

    def persistent_id(self) -> None:
        if self._persistent is None:
            raise RefusedPickle("has a persistent id, which no plain value needs")
        self._stack.append(self._persistent(self._stack.pop()))

    # --- named classes -----------------------------------------------------------------------------------------------

    def name_of_lines(self) -> None:
        module = self._line()
        self._find(module, self._line())

    def name_of_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._find(module, name)

    def _find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise RefusedPickle("has a name that is not text")
        if (module, name) not in self._names:
            said = "".join(c if c.isprintable() else "?" for c in f"{module}.{name}"[:_MAX_NAME])
            raise RefusedPickle(f"names {said}, which is not allowed in a checkpoint")
        self._stack.append(self._names[module, name])

    def reduce(self) -> None:
        arguments, called = self._stack.pop(), self._stack.pop()
        if type(called) is not Name or called.call is None or type(arguments) is not tuple:
            raise RefusedPickle("calls something that may not be called")
        value = called.call(*arguments)
        if type(value) is bytes:
            # A shared string could be encoded repeatedly until memory is full.
            self._bytes_of_calls += len(value)
            if self._bytes_of_calls > len(self._data):
                raise RefusedPickle("creates more bytes than it contains")
        self._stack.append(value)

    def new(self) -> None:
        arguments, made = self._stack.pop(), self._stack.pop()
        if type(made) is not Name or made.new is None or type(arguments) is not tuple or arguments:
            raise RefusedPickle("instantiates something that is not a class")
        self._stack.append(made.new())

    def build(self) -> None:
        state = self._stack.pop()
        fill = self._fillers.get(type(self._stack[-1]))
        if fill is None:
            raise RefusedPickle("sets the state of something without state")
        fill(self._stack[-1], state)


_OPERATIONS = {
    ord(code): name
    for code, name in {
        "\x80": "proto",
        "\x95": "frame",
        "N": "none",
        "\x88": "true",
        "\x89": "false",
        "K": "int1",
        "M": "int2",
        "J": "int4",
        "\x8a": "long1",
        "G": "float8",
        "\x8c": "text1",
        "X": "text4",
        "\x8d": "text8",
        "C": "bytes1",
        "B": "bytes4",
        "\x8e": "bytes8",
        "(": "mark",
        ")": "empty_tuple",
        "]": "empty_list",
        "}": "empty_dict",
        "t": "tuple_",
        "\x85": "tuple1",
        "\x86": "tuple2",
        "\x87": "tuple3",
        "a": "append",
        "e": "appends",
        "s": "item",
        "u": "items",
        "\x94": "memoize",
        "q": "put1",
        "r": "put4",
        "h": "get1",
        "j": "get4",
        "Q": "persistent_id",
        "c": "name_of_lines",
        "\x93": "name_of_stack",
        "R": "reduce",
        "\x81": "new",
        "b": "build",
    }.items()
}
