"""Pickles that do harm when loaded by pickle, and others that no checkpoint may contain."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

STOP = b"."


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def dotted(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + b"\x93"


def call(function: bytes, *arguments: bytes) -> bytes:
    return function + b"(" + b"".join(arguments) + b"tR"


def touch(mark: Path) -> bytes:
    return text(f"touch '{mark}'")


SYSTEM = name("os", "system")
FILES = "torch.distributed.checkpoint.filesystem"
METADATA = "torch.distributed.checkpoint.metadata"


def getattr_chain(mark: Path) -> bytes:
    get = name("builtins", "getattr")
    return call(call(get, call(get, name("torch", "serialization"), text("os")), text("system")), touch(mark))


def method_caller(mark: Path) -> bytes:
    caller = call(name("operator", "methodcaller"), text("touch"))
    return call(caller, call(name("pathlib", "PosixPath"), text(str(mark))))


def storage_loader(mark: Path) -> bytes:
    """Pickle that calls torch's storage loader, which unpickles its bytes again."""
    inner = torch_file(call(SYSTEM, touch(mark)))
    return call(name("torch.storage", "_load_from_bytes"), b"B" + struct.pack("<I", len(inner)) + inner)


def state_of_an_instance(mark: Path) -> bytes:
    """Pickle whose BUILD calls an attribute that an earlier BUILD has set."""
    made = name(METADATA, "StorageMeta") + b")\x81}" + text("__setstate__") + SYSTEM + b"sb"
    return made + touch(mark) + b"b"


HARMFUL: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda mark: call(SYSTEM, touch(mark)),
    "dotted name": lambda mark: call(dotted("torch", "os.system"), touch(mark)),
    "FileIO by a dotted name": lambda mark: call(dotted(FILES, "io.FileIO"), text(str(mark)), text("w")),
    "getattr": getattr_chain,
    "FileIO": lambda mark: call(name("io", "FileIO"), text(str(mark)), text("w")),
    "partial": lambda mark: call(call(name("functools", "partial"), SYSTEM), touch(mark)),
    "eval": lambda mark: call(name("builtins", "eval"), text(f"open({str(mark)!r}, 'w')")),
    "exec": lambda mark: call(name("builtins", "exec"), text(f"open({str(mark)!r}, 'w')")),
    "attrgetter": lambda mark: call(
        call(call(name("operator", "attrgetter"), text("os.system")), name("torch", "serialization")), touch(mark)
    ),
    "methodcaller": method_caller,
    "torch's storages": storage_loader,
    # The function is named where it is discarded, and called by its memo index.
    "memo": lambda mark: SYSTEM + b"\x940h\x00(" + touch(mark) + b"tR",
    "state of an instance": state_of_an_instance,
    "INST": lambda mark: b"(" + touch(mark) + b"ios\nsystem\n",
    "OBJ": lambda mark: b"(" + SYSTEM + touch(mark) + b"o",
    "subprocess": lambda mark: call(name("subprocess", "getoutput"), touch(mark)),
}
"""Programs that change the file at a path, by the mechanism that they use."""

DEEP = 100_000
DOUBLED = b"(](NNe" + b"q\x00](h\x00h\x00e" * 60 + b"t"
"""Nested lists, each of which contains the previous one twice: 2^61 items."""
ENCODED = call(name("_codecs", "encode"), b"h\x00" + text("latin1"))

BURDENSOME: dict[str, bytes] = {
    "deep key": b"}N" + b"\x85" * DEEP + b"Ns",
    "deep list": b"]" * DEEP + b"a" * (DEEP - 1),
    "doubled lists": DOUBLED,
    "doubled dictionaries": b"(}" + b"q\x00}(Nh\x00\x88h\x00u" * 60 + b"t",
    "doubled namespace": name("argparse", "Namespace") + b")\x81}" + text("a") + DOUBLED + b"sb",
    "doubled tuple as a key": call(
        name("collections", "OrderedDict"), b"]((N\x85" + b"q\x00h\x00\x86" * 60 + b"tN\x86e"
    ),
    "layout of doubled lists": call(name("torch.serialization", "_get_layout"), DOUBLED),
    "layout of doubled tuples": call(name("torch.serialization", "_get_layout"), b"N\x85" + b"q\x00h\x00\x86" * 60),
    "long key": b"(" + b"N" * 100 + b"tq\x00}(" + b"h\x00N" * 100 + b"u",
    "list that holds itself": b"]q\x00h\x00a",
    "bytes made again and again": b"(" + text("a" * 1000) + b"q\x00" + ENCODED * 100 + b"t",
    "huge bytes": b"\x8e" + struct.pack("<Q", 1 << 62),
    "huge text": b"\x8d" + struct.pack("<Q", 1 << 62),
    "huge number": b"\x8b" + struct.pack("<i", (1 << 31) - 1),
    "huge array": call(name("builtins", "bytearray"), b"\x8a\x08" + struct.pack("<q", 1 << 50)),
    "keyword arguments": name("builtins", "int") + b")}\x92",
    "extension": b"\x82\x01",
    "persistent id": b"NQ",
    "class that is filled": name(METADATA, "Metadata") + b"N}" + text("__init__") + b"Ns\x86b",
    "other fields": name(METADATA, "Metadata") + b")\x81}" + text("__class__") + b"Nsb",
    "no end": b"(N",
    "text": b"not a pickle",
    "nothing": b"",
}
"""Programs that exhaust memory or the stack, or are malformed."""


def whole(program: bytes) -> bytes:
    """Return a complete pickle of a program."""
    return b"\x80\x04" + program + STOP


def torch_file(program: bytes) -> bytes:
    """Return a file of torch.save whose pickle is a program."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + program + STOP)
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/version", b"3\n")
    return content.getvalue()


def index(size: int = 4, file: str = "a.distcp", **changed: Any) -> bytes:
    """Index of one tensor.

    Args:
        size: number of elements in the tensor's entry.
        file: file of the tensor.
        changed: attributes of the metadata to replace.
    """
    whole_size = torch.Size([size])
    entry = TensorStorageMetadata(TensorProperties(torch.float32), whole_size, [])
    entry.chunks.append(ChunkStorageMetadata(torch.Size([0]), whole_size))
    place = _StorageInfo(relative_path=file, offset=0, length=1000)
    metadata = Metadata({"a": entry}, storage_data={MetadataIndex("a", torch.Size([0])): place})
    for field, value in changed.items():
        setattr(metadata, field, value)
    return pickle.dumps(metadata)


def as_object(content: bytes, key: str) -> bytes:
    """Change an entry of an index from a tensor to an object."""
    metadata = pickle.loads(content)
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    return pickle.dumps(metadata)


def compress(path: Path, packed: Path) -> None:
    """Copy a file of torch.save with compressed records."""
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as other:
        for info in archive.infolist():
            other.writestr(info.filename, archive.read(info))
