"""Restricted unpickling: no file runs code, and pickles written for checkpoints load unchanged."""

from __future__ import annotations

import io
import os
import pickle
from argparse import Namespace
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _metadata_fn, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.checkpoint import restricted_pickle
from megatron_ext.checkpoint.common_state import read_common_state
from megatron_ext.checkpoint.extent import MAX_DEPTH, MAX_ITEMS, RefusedPickle, check_extent
from megatron_ext.checkpoint.metadata_file import _NAMES as METADATA_NAMES
from megatron_ext.checkpoint.metadata_file import read_metadata
from megatron_ext.checkpoint.metadata_index import FILE_NAME
from megatron_ext.checkpoint.metadata_plain import _NAMES as PLAIN_NAMES
from megatron_ext.checkpoint.metadata_plain import DTYPES as PLAIN_DTYPES
from megatron_ext.checkpoint.metadata_plain import read_plain
from megatron_ext.checkpoint.pickle_names import argparse_namespace
from megatron_ext.checkpoint.restricted_pickle import load
from megatron_ext.checkpoint.torch_file import NAMES, load_file
from megatron_ext.utils.errors import UserError

INDEX_READERS = (read_metadata, read_plain)
"""Readers of the index, with torch's classes and with stand-ins for them."""


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def _load_from_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=False)


@pytest.mark.parametrize("kind", hostile.HARMFUL)
def test_harm_is_refused(kind: str, mark: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = hostile.HARMFUL[kind](mark)
    mark.write_text("precious") if "FileIO" in kind else None
    (mark.parent / FILE_NAME).write_bytes(hostile.whole(program))
    (mark.parent / "common.pt").write_bytes(hostile.torch_file(program))
    for read, file in ((read_metadata, FILE_NAME), (read_plain, FILE_NAME), (read_common_state, "common.pt")):
        with pytest.raises(UserError, match=rf"^{mark.parent}/{file}: cannot be read: it [^\n]*; copy [^\n]*$"):
            read(mark.parent)
    assert mark.read_text() == "precious" if "FileIO" in kind else not mark.exists()
    # Python's unpickler does the harm, so the refusal is not vacuous. megatron-core replaces the loader since 0.17.1.
    monkeypatch.setattr(torch.storage, "_load_from_bytes", _load_from_bytes)
    pickle.loads(hostile.whole(program))
    assert mark.read_text() == ""


@pytest.mark.parametrize("kind", hostile.BURDENSOME)
def test_burdens_are_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(hostile.whole(hostile.BURDENSOME[kind]))
    (tmp_path / "common.pt").write_bytes(hostile.torch_file(hostile.BURDENSOME[kind]))
    for read in (read_metadata, read_plain, read_common_state):
        with pytest.raises(UserError, match="cannot be read: it "):
            read(tmp_path)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("doubled lists", "shares its parts so often"),
        ("doubled dictionaries", "shares its parts so often"),
        ("doubled namespace", "shares its parts so often"),
        ("doubled tuple as a key", "is not a readable pickle"),
        ("layout of doubled lists", "has an invalid layout"),
        ("layout of doubled tuples", "has an invalid layout"),
        ("long key", "has a key that is not a plain value"),
        ("list that holds itself", "has a container that contains itself"),
        ("bytes made again and again", "creates more bytes than it contains"),
    ],
)
def test_what_stands_for_more_than_it_is(kind: str, problem: str) -> None:
    names = {**METADATA_NAMES, **NAMES, ("argparse", "Namespace"): argparse_namespace()}
    with pytest.raises(RefusedPickle, match=problem):
        load(hostile.whole(hostile.BURDENSOME[kind]), names)
    names[("collections", "OrderedDict")] = METADATA_NAMES[("collections", "OrderedDict")]
    with pytest.raises(RefusedPickle, match=problem):
        load(hostile.whole(hostile.BURDENSOME[kind]), names)


def test_an_index_that_shares_its_parts(tmp_path: Path) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([1]))] * 4000
    entry = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([1]), chunks)
    for number, problem in ((4000, "shares its parts so often"), (2, None)):
        entries = {f"a{key}": TensorStorageMetadata(entry.properties, entry.size, chunks) for key in range(number)}
        (tmp_path / FILE_NAME).write_bytes(hostile.index(state_dict_metadata=entries))
        if problem is None:
            assert len(read_metadata(tmp_path).state_dict_metadata["a1"].chunks) == 4000
            continue
        for read in INDEX_READERS:
            with pytest.raises(UserError, match=problem):
                read(tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (hostile.index(size=1 << 50), "describes a tensor that is larger than the whole checkpoint"),
        (hostile.index(file="../b.distcp"), "names a file that is not in the checkpoint's folder"),
        (hostile.index(file="/etc/passwd"), "names a file that is not in the checkpoint's folder"),
        (hostile.index(file="a\nb"), "names a file that is not in the checkpoint's folder"),
        (hostile.index(storage_data={}), "is no checkpoint's metadata"),
        (hostile.index(state_dict_metadata={"a": None}), "describes something that is neither a tensor nor an object"),
        (hostile.index(more=1), "has a Metadata with other fields than its own"),
        (pickle.dumps({"a": torch.Size([1])}), "is no checkpoint's metadata"),
    ],
)
def test_what_is_no_index(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    for read in INDEX_READERS:
        with pytest.raises(UserError, match=f"{FILE_NAME}: cannot be read: it {problem}; "):
            read(tmp_path)


def test_an_index_is_read_as_it_is(tmp_path: Path) -> None:
    content = hostile.index(all_local_plans=[], mcore_data={"a": {"b": 1}}, planner_data={"a": ("b", 1)})
    (tmp_path / FILE_NAME).write_bytes(content)
    found, expected = read_metadata(tmp_path), pickle.loads(content)
    assert type(found) is Metadata
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.storage_data == expected.storage_data


def test_stand_ins_say_what_torchs_classes_say(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(hostile.index(all_local_plans=[], mcore_data={"a": {"b": 1}}))
    found, expected = read_plain(tmp_path), read_metadata(tmp_path)
    assert found.state_dict_metadata.keys() == expected.state_dict_metadata.keys()
    for key, entry in expected.state_dict_metadata.items():
        plain: Any = found.state_dict_metadata[key]
        assert (plain.size, str(plain.properties.dtype)) == (tuple(entry.size), str(entry.properties.dtype))
        assert [vars(chunk) for chunk in plain.chunks] == [vars(chunk) for chunk in entry.chunks]
    places = {(index.fqn, index.offset, index.index): vars(place) for index, place in found.storage_data.items()}
    assert places == {(i.fqn, i.offset, i.index): vars(place) for i, place in expected.storage_data.items()}
    assert _metadata_fn == FILE_NAME


def test_stand_ins_are_named_as_torchs_classes_are() -> None:
    assert PLAIN_NAMES.keys() <= METADATA_NAMES.keys()
    missing = METADATA_NAMES.keys() - PLAIN_NAMES.keys()
    assert all(isinstance(METADATA_NAMES[name], torch.dtype) for name in missing)
    for name, dtype in PLAIN_DTYPES.items():
        real = getattr(torch, name)
        assert (str(dtype), dtype.itemsize) == (str(real), real.itemsize)
        assert dtype.is_floating_point == real.is_floating_point


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(UserError, match=r"cannot be read \(is not a regular file\)"):
        read_metadata(tmp_path)


def test_pickles_of_plain_values() -> None:
    value = {
        "numbers": [0, 255, 65535, -1, 2**31, -(2**70), 0.1, float("inf"), True, False, None],
        "texts": ["", "ä" * 300, "\ud800", b"", b"\xff" * 300],
        ("a", 1): ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        3: Namespace(a=[1], b={"c": ()}),
    }
    value["again"] = value["numbers"]
    names = {("argparse", "Namespace"): argparse_namespace()}
    for protocol in range(2, 6):
        value["texts"] = value["texts"][:3] if protocol == 2 else value["texts"]  # protocol 2 writes bytes as calls
        found = load(pickle.dumps(value, protocol), names)
        assert found == value
        assert found["again"] is found["numbers"]
    for protocol in (0, 1):
        with pytest.raises(RefusedPickle):
            load(pickle.dumps(value, protocol), names)


def test_depth_has_a_bound() -> None:
    value: Any = ()
    for level in range(MAX_DEPTH - 1):
        value = [[value], (value,), {0: value}, Namespace(a=value)][level % 4]
    check_extent(value)
    with pytest.raises(RefusedPickle, match="nests containers deeper than"):
        check_extent([value])
    # The deep container is also reachable by a short chain, which is visited first.
    with pytest.raises(RefusedPickle, match="nests containers deeper than"):
        check_extent([value, value])
    value = []
    value.append((value,))
    with pytest.raises(RefusedPickle, match="contains itself"):
        check_extent(value)


def test_shared_parts_count_each_time() -> None:
    part = list(range(1000))
    check_extent([part] * (MAX_ITEMS // 1001))
    with pytest.raises(RefusedPickle, match="shares its parts so often"):
        check_extent([part] * (MAX_ITEMS // 1000))
    place = _StorageInfo("a", 0, 1, list(range(1000)))
    check_extent([place] * (MAX_ITEMS // 1000))
    with pytest.raises(RefusedPickle, match="shares its parts so often"):
        check_extent([place] * (MAX_ITEMS // 1000), {_StorageInfo})


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("on_disk", [False, True])
def test_files_of_torch(tmp_path: Path, on_disk: bool) -> None:
    """Compare every value with the result of torch.load."""
    base = torch.arange(24.0).view(4, 6)
    views = [base, base.T, base[1:, 2:4], base[:, 0], torch.empty(0), torch.empty(3, 0), torch.tensor(3.0)]
    value = {
        "views": views,
        "dtypes": {str(dtype): torch.arange(7).to(dtype) for dtype in DTYPES},
        "parameter": torch.nn.Parameter(base),
        "plain": OrderedDict(a=1, b=(2, None, True, b"ab\xff", 1.5, 2**70, -3)),
        "types": [torch.bfloat16, torch.Size([1, 2])],
        "module": torch.nn.Linear(2, 3).state_dict(),
    }
    torch.save(value, tmp_path / "file.pt")
    found, expected = load_file(tmp_path / "file.pt", on_disk=on_disk), torch.load(tmp_path / "file.pt")
    assert (found["plain"], found["types"]) == (value["plain"], value["types"])
    tensors = [*zip(found["views"], expected["views"], strict=True), (found["parameter"], expected["parameter"].data)]
    tensors += [(found[part][key], one) for part in ("dtypes", "module") for key, one in expected[part].items()]
    for one, other in tensors:
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][1].untyped_storage().data_ptr()


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize(
    ("size", "stride", "offset"), [((1 << 40,), (0,), 0), ((9,), (1,), 0), ((2, 2), (4, 5), 0), ((4,), (1,), 5)]
)
def test_a_tensor_has_no_more_than_its_storage(
    tmp_path: Path, size: tuple[int, ...], stride: tuple[int, ...], offset: int, on_disk: bool
) -> None:
    class Rebuilt:
        def __reduce__(self) -> Any:
            arguments = (torch.arange(8.0).storage(), offset, size, stride, False, OrderedDict())
            return torch._utils._rebuild_tensor_v2, arguments

    torch.save(Rebuilt(), tmp_path / "file.pt")
    with pytest.raises(RefusedPickle, match="has a tensor that is larger than its storage"):
        load_file(tmp_path / "file.pt", on_disk=on_disk)


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_file_that_is_cut_off_or_compressed(tmp_path: Path, on_disk: bool) -> None:
    torch.save(torch.arange(1000.0), tmp_path / "file.pt")
    content = (tmp_path / "file.pt").read_bytes()
    for length in (0, 1, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "cut.pt").write_bytes(content[:length])
        with pytest.raises(RefusedPickle, match="or is truncated"):
            load_file(tmp_path / "cut.pt", on_disk=on_disk)
    hostile.compress(tmp_path / "file.pt", tmp_path / "packed.pt")
    with pytest.raises(RefusedPickle, match="has no plain record"):
        load_file(tmp_path / "packed.pt", on_disk=on_disk)


PRIME = (1 << 61) - 1
"""Modulus of Python's hash of integers."""


def written(keys: list[Any]) -> bytes:
    return pickle.dumps(dict.fromkeys(keys), 2)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("whole numbers", [PRIME * number for number in range(700)]),
        ("tuples", [tuple(PRIME * (number >> bit & 1) for bit in range(10)) for number in range(700)]),
        (
            "indices",
            [MetadataIndex("w", torch.Size([PRIME * (n >> bit & 1) for bit in range(8)])) for n in range(200)],
        ),
    ],
)
def test_keys_of_one_hash_are_refused(kind: str, keys: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred thousand such keys would each be compared with all previous ones, for minutes."""
    assert restricted_pickle._MAX_COMPARISONS <= 20_000_000
    monkeypatch.setattr(restricted_pickle, "_MAX_COMPARISONS", 200_000)
    assert len({hash(key) for key in keys}) == 1
    assert len(load(written(keys[: len(keys) // 2]), METADATA_NAMES)) == len(keys) // 2
    with pytest.raises(RefusedPickle, match="has too many colliding numeric keys"):
        load(written(keys), METADATA_NAMES)
    half = [written([*keys[: len(keys) * 2 // 5], str(part)])[2:-1] for part in range(10)]  # in several dictionaries
    with pytest.raises(RefusedPickle, match="has too many colliding numeric keys"):
        load(b"\x80\x02(" + b"".join(half) + b"t.", METADATA_NAMES)


def test_keys_that_checkpoints_have_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restricted_pickle, "_MAX_COMPARISONS", 0)
    texts = [f"decoder.layers.{number}.weight" for number in range(3_000)]
    ids = [number + number // 3 for number in range(3_000)]  # ids of parameters, with gaps for frozen ones
    places = [MetadataIndex("w", torch.Size([number, 0])) for number in range(3_000)]
    for keys in (texts, ids, places, [None, True]):
        assert list(load(written(keys), METADATA_NAMES)) == keys
