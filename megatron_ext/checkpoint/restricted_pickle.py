"""Restricted reader of pickles: plain values, and classes from an exact list of names.

A pickle is a program. This interpreter only supports the opcodes for plain values and data classes. It imports nothing.
Names are looked up in a table by their exact (module, name) pair. Only functions of that table are called, and only
they set attributes. The amount of data read is bounded by the size of the file.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from megatron_ext.checkpoint.extent import RefusedPickle, check_extent
from megatron_ext.checkpoint.pickle_names import AllowedName, AllowedNames

_MAX_NAME_LENGTH = 200
_MAX_KEY_LENGTH = 64
"""Most elements of a tuple used as a key, because its hash is recomputed at every use."""
_MAX_COMPARISONS = 20_000_000
"""Most comparisons of keys with hashes under an author's control. Each takes up to 30 ns."""
_MIN_KEY_RANGE = 1024
_SCALARS = (str, int, float, bool, bytes, type(None))


def load(data: bytes, names: AllowedNames, persistent: Callable[[Any], Any] | None = None) -> Any:
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
        value = _Interpreter(data, names, persistent).run()
        check_extent(value, set(_fillers(names)))
        return value
    except RefusedPickle:
        raise
    except Exception as error:
        text = "".join(c if c.isprintable() else "?" for c in str(error))[:_MAX_NAME_LENGTH]
        raise RefusedPickle(f"is not a readable pickle ({type(error).__name__}: {text})") from error


def _fillers(names: AllowedNames) -> dict[type, Callable[[Any, Any], None] | None]:
    """Return the `fill` functions of the allowed classes that have instances, by type of instance."""
    entries = [entry for entry in names.values() if isinstance(entry, AllowedName)]
    return {entry.instance_type: entry.fill for entry in entries if entry.instance_type is not None}


class _Interpreter:
    def __init__(self, data: bytes, names: AllowedNames, persistent: Callable[[Any], Any] | None) -> None:
        self._data, self._names, self._persistent = data, names, persistent
        self._fillers = _fillers(names)
        self._position = 0
        self._stack: list[Any] = []
        self._metastack: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._num_created_bytes = 0
        self._num_comparisons = 0
        self._hashes: dict[int, set[int]] = {}  # by id of a dictionary: hashes of its keys that are instances

    def run(self) -> Any:
        data, stop = self._data, ord(".")
        operations = {code: getattr(self, name) for code, name in _OPERATIONS.items()}
        while True:
            code = data[self._position]
            self._position += 1
            if code == stop:
                break
            operation = operations.get(code)
            if operation is None:
                raise RefusedPickle(f"has the opcode {bytes([code])!r}, which no plain value needs")
            operation()
        if self._metastack or len(self._stack) != 1:
            raise RefusedPickle("does not end with one value")
        return self._stack[0]

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._data):
            raise RefusedPickle(f"ends within a value of {count} bytes")
        found = self._data[self._position : end]
        self._position = end
        return found

    def _read_number(self, form: str) -> Any:
        return struct.unpack(form, self._read_bytes(struct.calcsize(form)))[0]

    def _read_byte(self) -> int:
        self._position += 1
        return self._data[self._position - 1]

    def _read_line(self) -> str:
        end = self._data.index(b"\n", self._position, self._position + _MAX_NAME_LENGTH + 1)
        line = self._data[self._position : end].decode()
        self._position = end + 1
        return line

    def proto(self) -> None:
        if not 2 <= self._read_byte() <= 5:
            raise RefusedPickle("has an unsupported protocol")

    def frame(self) -> None:
        self._read_bytes(8)

    # --- plain values ------------------------------------------------------------------------------------------------

    def none(self) -> None:
        self._stack.append(None)

    def true(self) -> None:
        self._stack.append(True)

    def false(self) -> None:
        self._stack.append(False)

    def int1(self) -> None:
        self._stack.append(self._read_byte())

    def int2(self) -> None:
        self._stack.append(self._read_number("<H"))

    def int4(self) -> None:
        self._stack.append(self._read_number("<i"))

    def long1(self) -> None:
        self._stack.append(int.from_bytes(self._read_bytes(self._read_byte()), "little", signed=True))

    def float8(self) -> None:
        self._stack.append(self._read_number(">d"))

    def text1(self) -> None:
        self._stack.append(self._read_bytes(self._read_byte()).decode("utf-8", "surrogatepass"))

    def text4(self) -> None:
        self._stack.append(self._read_bytes(self._read_number("<I")).decode("utf-8", "surrogatepass"))

    def text8(self) -> None:
        self._stack.append(self._read_bytes(self._read_number("<Q")).decode("utf-8", "surrogatepass"))

    def bytes1(self) -> None:
        self._stack.append(self._read_bytes(self._read_byte()))

    def bytes4(self) -> None:
        self._stack.append(self._read_bytes(self._read_number("<I")))

    def bytes8(self) -> None:
        self._stack.append(self._read_bytes(self._read_number("<Q")))

    # --- containers --------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        self._metastack.append(self._stack)
        self._stack = []

    def _pop_mark(self) -> list[Any]:
        found, self._stack = self._stack, self._metastack.pop()
        return found

    def empty_tuple(self) -> None:
        self._stack.append(())

    def empty_list(self) -> None:
        self._stack.append([])

    def empty_dict(self) -> None:
        self._stack.append({})

    def tuple_(self) -> None:
        found = tuple(self._pop_mark())
        self._stack.append(found)

    def tuple1(self) -> None:
        self._make_tuple(1)

    def tuple2(self) -> None:
        self._make_tuple(2)

    def tuple3(self) -> None:
        self._make_tuple(3)

    def _make_tuple(self, count: int) -> None:
        if len(self._stack) < count:
            raise RefusedPickle("pops more from its stack than it has pushed")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def append(self) -> None:
        value = self._stack.pop()
        self._extend([value])

    def appends(self) -> None:
        self._extend(self._pop_mark())

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise RefusedPickle("appends to something that is not a list")
        self._stack[-1].extend(values)

    def item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set_items([key, value])

    def items(self) -> None:
        self._set_items(self._pop_mark())

    def _set_items(self, pairs: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) not in (dict, OrderedDict):
            raise RefusedPickle("sets items of something that is not a dictionary")
        if len(pairs) % 2:
            raise RefusedPickle("has a key without a value")
        for index in range(0, len(pairs), 2):
            key = pairs[index]
            # Hashing nested tuples recurses in C without a limit.
            if isinstance(key, tuple) and not (
                len(key) <= _MAX_KEY_LENGTH and all(isinstance(part, _SCALARS) for part in key)
            ):
                raise RefusedPickle("has a key that is not a plain value")
            self._count_comparisons(target, key)
            target[key] = pairs[index + 1]

    def _count_comparisons(self, target: Mapping[Any, Any], key: Any) -> None:
        """Bound the comparisons of a new key with earlier keys of the same hash.

        Hashes of strings cannot be chosen, because they are salted per process. Integers that count from 0 do not
        collide. The hash of an instance also depends on a string, but instances that share that string can be given
        equal hashes.

        Raises:
            RefusedPickle: there are too many comparisons.
        """
        key_type = type(key)
        if key_type in (str, bytes, bool, type(None)):
            return
        if key_type is int and 0 <= key < 4 * len(target) + _MIN_KEY_RANGE:
            return
        if key_type not in (int, float, tuple):
            known, key_hash = self._hashes.setdefault(id(target), set()), hash(key)
            if key_hash not in known:
                known.add(key_hash)
                return
            self._num_comparisons += 15 * len(target)  # instances are compared in Python, which is slower
        self._num_comparisons += len(target)
        if self._num_comparisons > _MAX_COMPARISONS:
            raise RefusedPickle("has too many colliding numeric keys")

    # --- references --------------------------------------------------------------------------------------------------

    def memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def put1(self) -> None:
        self._memo[self._read_byte()] = self._stack[-1]

    def put4(self) -> None:
        index = self._read_number("<I")
        self._count_comparisons(self._memo, index)
        self._memo[index] = self._stack[-1]

    def get1(self) -> None:
        self._stack.append(self._memo[self._read_byte()])

    def get4(self) -> None:
        self._stack.append(self._memo[self._read_number("<I")])

    def persistent_id(self) -> None:
        if self._persistent is None:
            raise RefusedPickle("has a persistent id, which no plain value needs")
        self._stack.append(self._persistent(self._stack.pop()))

    # --- named classes -----------------------------------------------------------------------------------------------

    def name_from_lines(self) -> None:
        module = self._read_line()
        self._push_name(module, self._read_line())

    def name_from_stack(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_name(module, name)

    def _push_name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise RefusedPickle("has a name that is not text")
        if (module, name) not in self._names:
            printable = "".join(c if c.isprintable() else "?" for c in f"{module}.{name}"[:_MAX_NAME_LENGTH])
            raise RefusedPickle(f"names {printable}, which is not allowed in a checkpoint")
        self._stack.append(self._names[module, name])

    def reduce(self) -> None:
        arguments, entry = self._stack.pop(), self._stack.pop()
        if type(entry) is not AllowedName or entry.call is None or type(arguments) is not tuple:
            raise RefusedPickle("calls something that may not be called")
        value = entry.call(*arguments)
        if type(value) is bytes:
            # A shared string could be encoded repeatedly until memory is full.
            self._num_created_bytes += len(value)
            if self._num_created_bytes > len(self._data):
                raise RefusedPickle("creates more bytes than it contains")
        self._stack.append(value)

    def new(self) -> None:
        arguments, entry = self._stack.pop(), self._stack.pop()
        if type(entry) is not AllowedName or entry.new is None or type(arguments) is not tuple or arguments:
            raise RefusedPickle("instantiates something that is not a class")
        self._stack.append(entry.new())

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
        "c": "name_from_lines",
        "\x93": "name_from_stack",
        "R": "reduce",
        "\x81": "new",
        "b": "build",
    }.items()
}
