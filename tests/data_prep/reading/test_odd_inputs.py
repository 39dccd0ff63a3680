"""Unusual but valid inputs: each record is read or counted exactly once, and nothing else is lost."""

import gzip
import io
import json
import os
import re
import socket
import tarfile
import zlib
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from prep_fakes import options, record, text

from data_prep.documents import Problems
from data_prep.prepare import prepare
from data_prep.reading import tars
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from megatron_ext.utils.errors import UserError

WEB = Fields(default="Web")


def read(path, fields=WEB):
    """Return the texts, and the counts by reason."""
    problems = Problems("skip")
    documents = list(open_files(path, fields).documents(problems))
    counts: Counter[str] = Counter()
    for (_, reason), number in problems.counts.items():
        counts[reason] += number
    return [document.text for document in documents], dict(counts)


# Tars with 40 samples. Something unusual replaces or precedes sample 20.


def odd_tar(path, *odd, suffix="txt"):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(40):
            for kind, name, more in odd if number == 20 else ():
                info = tarfile.TarInfo(name)
                info.type = kind
                content = more if isinstance(more, bytes) else b""
                info.linkname = more if isinstance(more, str) else ""
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            if number != 20 or not odd or all(kind == tarfile.DIRTYPE for kind, _, _ in odd):
                content = text(number).encode()
                info = tarfile.TarInfo(f"{number:02d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


@pytest.mark.parametrize(
    ("odd", "count"),
    [
        ([(tarfile.SYMTYPE, "20.txt", "../../etc/passwd")], {"not a file": 1}),
        ([(tarfile.LNKTYPE, "20.txt", "00.txt")], {"not a file": 1}),
        ([(tarfile.LNKTYPE, "20.txt", "00.txt"), (tarfile.REGTYPE, "20.json", b'{"text": "x"}')], {"not a file": 1}),
        ([(tarfile.FIFOTYPE, "20.txt", "")], {"not a file": 1}),
        ([(tarfile.CHRTYPE, "20.txt", "")], {"not a file": 1}),
        ([(b"M", "20.txt", b"the rest of a file")], {"not a file": 1}),
        ([(tarfile.DIRTYPE, "folder.txt", "")], {}),
        ([(tarfile.REGTYPE, "20.txt", b"one"), (tarfile.REGTYPE, "20.txt", b"two")], {"two members of one name": 1}),
        ([(tarfile.REGTYPE, "20.txt", b"one"), (tarfile.REGTYPE, "20.TXT", b"two")], {"two members of one name": 1}),
        ([(tarfile.REGTYPE, "20.json", b"[" * 100_000)], {"not JSON": 1}),
        ([(tarfile.REGTYPE, "20.json", b'{"a": ' + b"9" * 5000 + b"}")], {"not JSON": 1}),
        ([(tarfile.REGTYPE, "20.json", b'"text"')], {"no text": 1}),
        ([(tarfile.REGTYPE, "20.jpg", b"x"), (tarfile.REGTYPE, "20.jpg", b"y")], {"no text": 1}),
        ([(tarfile.REGTYPE, "__meta__/x", b"y"), (tarfile.REGTYPE, "20.jpg", b"y")], {"no text": 1}),
    ],
)
def test_odd_member_affects_only_its_sample(tmp_path, odd, count):
    odd_tar(tmp_path / "a.tar", *odd)
    texts, counts = read(tmp_path)
    assert counts == count
    assert texts == [text(number) for number in range(40) if number != 20 or not count]


def test_odd_member_names(tmp_path):
    names = ["../../up.txt", "/etc/passwd.txt", "new\nline.txt", "\udcff.txt", "long/" * 60 + "x.txt"]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    documents = list(open_files(tmp_path, WEB).documents(Problems()))
    assert [document.id for document in documents] == [
        "a.tar:../../up",
        "a.tar:/etc/passwd",
        "a.tar:new\\nline",
        "a.tar:\\udcff",
        "a.tar:" + "long/" * 60 + "x",
    ]


def test_sparse_file(tmp_path):
    """GNU's old format: a map of two parts in the header, with zeros between them."""
    info = tarfile.TarInfo("a.txt")
    info.type, info.size = tarfile.GNUTYPE_SPARSE, 1024
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    for place, number in zip((386, 398, 410, 422, 483), (0, 512, 1024, 512, 1536), strict=True):
        header[place : place + 12] = b"%011o\0" % number
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + b"a" * 512 + b"b" * 512 + bytes(1024))
    assert read(tmp_path) == (["a" * 512 + "\0" * 512 + "b" * 512], {})


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK])
def test_header_with_a_huge_size(tmp_path, kind):
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 4 << 30
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    assert read(tmp_path) == ([], {"tar broken": 1})


def test_global_attributes_are_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(tars, "MAX_GLOBAL_ATTRIBUTES", 5)
    for count, expected in ((5, (["abc"], {})), (6, ([], {"tar broken": 1}))):
        given = {f"key{number}": "x" for number in range(count)}
        with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT, pax_headers=given) as tar:
            info = tarfile.TarInfo("a.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
        assert read(tmp_path) == expected


# JSON Lines.


@pytest.mark.parametrize(
    ("content", "texts", "count"),
    [
        (b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"], {}),
        ('{"text": "a\u2028b\u0085c"}\n{"text": "d"}'.encode(), ["a\u2028b\x85c", "d"], {}),
        (b'{"text": "a"}\r{"text": "b"}\r', [], {"not JSON": 1}),
        (b'{"text": "a", "n": NaN, "m": ' + b"9" * 5000 + b'}\n{"text": "b"}', ["b"], {"not JSON": 1}),
        (b'{"text": "a", "n": [NaN, Infinity, 1e999]}', ["a"], {}),
        (b"[" * 100_000 + b'\n{"text": "b"}', ["b"], {"not JSON": 1}),
        (b'{"text": "a", "domain": "\\ud800"}\n{"text": "b"}', ["b"], {"domain is not valid Unicode": 1}),
        (b'{"text": "a", "domain": ["C4"]}\n{"text": "b"}', ["b"], {"no domain": 1}),
        (b'{"text": "a", "domain": "%s"}\n{"text": "b"}' % (b"d" * 201), ["b"], {"domain too long": 1}),
        (b'{"text": "a", "meta": [1, {"b": {}}], "domain": "x"}', ["a"], {}),
        (b'{"text": "a", "meta": {"redpajama_set_name": {"x": 1}}}', [], {"no domain": 1}),
        (b'{"text": {"a": "b"}}\n{"text": ["a"]}\n{"text": 5}\n{"text": null}\n{"text": true}', [], {"no text": 5}),
        (b'{"text": "a"} {"text": "b"}', [], {"not JSON": 1}),
        (b"\n \n\t\n\r\n", [], {}),
        (b"", [], {}),
        (b"\0" * 100, [], {"not JSON": 1}),
        ('{"text": "a"}\n'.encode("utf-16"), [], {"not UTF-8": 1, "not JSON": 1}),
    ],
)
def test_lines(tmp_path, content, texts, count):
    (tmp_path / "a.jsonl").write_bytes(content)
    assert read(tmp_path) == (texts, count)
    (tmp_path / "a.jsonl").unlink()
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(content))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(content))
    assert read(tmp_path) == (texts * 2, {reason: 2 * number for reason, number in count.items()})


@pytest.mark.parametrize(
    ("content", "detail", "hint"),
    [
        (b'{"content": "a", "id": 1}', "no `text` among its keys: content, id", "give the key of the text with --text"),
        (b'{"text": ["a"]}', "`text` is a list", "repair it"),
        (b'{"text": " "}', "`text` is empty", "repair it"),
        (b'["a"]', "a list, not an object", "repair it"),
        (b"{}", "an empty object", "give the key of the text with --text-key"),
    ],
)
def test_messages_about_missing_text(tmp_path, content, detail, hint):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.jsonl:1: no text \({re.escape(detail)}\); {hint}"):
        list(open_files(tmp_path, WEB).documents(Problems()))


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        (b'{"text": "a"}', "neither `meta.redpajama_set_name` nor `domain`"),
        (b'{"text": "a", "domain": 3}', "it is a number"),
        (b'{"text": "a", "domain": " "}', "it is empty"),
    ],
)
def test_messages_about_missing_domains(tmp_path, content, detail):
    (tmp_path / "a.jsonl").write_bytes(content)
    message = rf"a\.jsonl:1: no domain \({detail}\); give such records a domain with --domain or pass --on-error skip$"
    with pytest.raises(UserError, match=message):
        list(open_files(tmp_path).documents(Problems()))


LINES = b'{"text": "a"}\n{"text": "b"}\n'
SKIPPABLE = b"\x50\x2a\x4d\x18\x05\0\0\0abcde"
BROKEN = {"compressed stream broken": 1}


def zstd_of_window(log):
    given = zstandard.ZstdCompressionParameters(window_log=log, compression_level=1)
    stream = zstandard.ZstdCompressor(compression_params=given).compressobj()  # without the content size
    return stream.compress(LINES) + stream.flush()


@pytest.mark.parametrize(
    ("name", "content", "texts", "count"),
    [
        ("gz", gzip.compress(LINES) + bytes(100_000), ["a", "b"], {}),
        ("gz", gzip.compress(LINES) + bytes(9) + gzip.compress(LINES) + bytes(9), ["a", "b", "a", "b"], {}),
        ("gz", gzip.compress(LINES) + b"garbage", ["a", "b"], BROKEN),
        ("gz", gzip.compress(LINES)[:-1], ["a", "b"], BROKEN),
        ("gz", gzip.compress(b"")[:10], [], BROKEN),
        ("gz", zlib.compress(LINES), [], BROKEN),
        ("gz", b"", [], BROKEN),
        ("gz", gzip.compress(b"") * 100 + gzip.compress(LINES), ["a", "b"], {}),
        ("zst", SKIPPABLE + zstandard.compress(LINES) + SKIPPABLE * 100, ["a", "b"], {}),
        ("zst", zstandard.compress(LINES[:17]) + SKIPPABLE + zstandard.compress(LINES[17:]), ["a", "b"], {}),
        ("zst", zstandard.compress(LINES) + b"garbage", ["a", "b"], BROKEN),
        ("zst", zstandard.compress(LINES) + SKIPPABLE[:-1], ["a", "b"], BROKEN),
        ("zst", zstandard.compress(LINES)[:-1], [], BROKEN),
        ("zst", b"", [], BROKEN),
        ("zst", zstd_of_window(27), ["a", "b"], {}),
        ("zst", zstd_of_window(28), [], BROKEN),
    ],
    ids=range(16),  # numbers, as a gzip header contains the time and ids must be equal in all test processes
)
def test_compressed_streams(tmp_path, name, content, texts, count):
    (tmp_path / f"a.jsonl.{name}").write_bytes(content)
    assert read(tmp_path) == (texts, count)


# Parquet.


def strings(*values, kind=pyarrow.string):
    return pyarrow.array(values, kind())


@pytest.mark.parametrize(
    ("columns", "texts", "count"),
    [
        ([("text", strings("a")), ("text", strings("b"))], [], {"two columns of one name": 1}),
        (
            [("text", strings("a")), ("domain", strings("b")), ("domain", strings("c"))],
            [],
            {"two columns of one name": 1},
        ),
        ([("text", strings("a", "b")), ("x", strings("c", "d")), ("x", strings("e", "f"))], ["a", "b"], {}),
        ([("text", pyarrow.nulls(2))], [], {"no text": 2}),
        ([("text", strings("a", None, "b"))], ["a", "b"], {"no text": 1}),
        ([("text", strings("a", "b", kind=pyarrow.large_string))], ["a", "b"], {}),
        ([("text", strings("a", "b", "a").dictionary_encode())], ["a", "b", "a"], {}),
        ([("text", pyarrow.array([b"a"], pyarrow.binary()))], [], {"no text": 1}),
        ([("text", pyarrow.array([{"a": "b"}]))], [], {"no text": 1}),
        ([("text", pyarrow.array([["a"], []]))], [], {"no text": 2}),
        ([("text", pyarrow.array([1, 2]))], [], {"no text": 2}),
        ([("text", strings("a")), ("meta", strings("not a struct"))], ["a"], {}),
        ([("text", strings("a")), ("domain", pyarrow.nulls(1))], ["a"], {}),
        # Besides the domain, a value that Python's types cannot represent.
        (
            [
                ("text", strings("a")),
                ("meta", pyarrow.array([{"redpajama_set_name": "C4", "when": 2**62}]).cast(
                    pyarrow.struct([("redpajama_set_name", pyarrow.string()), ("when", pyarrow.timestamp("us"))]))),
            ],
            ["a"],
            {},
        ),
        ([("text", pyarrow.array([2**62], pyarrow.timestamp("us")))], [], {"a value that cannot be read": 1}),
        ([], [], {"no text": 1}),
    ],
)  # fmt: skip
def test_columns(tmp_path, columns, texts, count):
    table = pyarrow.Table.from_arrays([array for _, array in columns], names=[name for name, _ in columns])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read(tmp_path) == (texts, count)


# Special files.


def make_pipe(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


@pytest.mark.parametrize(("make", "kind"), [(make_pipe, "a pipe"), (make_socket, "a socket")])
def test_pipe_is_rejected_without_blocking(tmp_path, monkeypatch, make, kind):
    monkeypatch.chdir(tmp_path)  # paths of sockets have a short maximum length
    make(tmp_path / "b.jsonl")
    (tmp_path / "a.jsonl").write_bytes(LINES)
    for source in (tmp_path, tmp_path / "b.jsonl"):
        with pytest.raises(UserError, match=rf"b\.jsonl: is {kind}; fix it or remove it"):
            open_files(source)
    (tmp_path / "b.jsonl").rename(tmp_path / "notes")  # an unsupported format: counted as a file would be
    assert read(tmp_path) == (["a", "b"], {})
    assert open_files(tmp_path).provenance()["not_read"][0]["examples"] == ["notes"]


def test_a_device_is_refused():
    with pytest.raises(UserError, match=r"^/dev/zero: is a device; fix it or remove it$|contains no"):
        open_files("/dev/zero")


def test_folder_with_a_file_suffix(tmp_path):
    (tmp_path / "x.jsonl").mkdir()
    (tmp_path / "x.jsonl" / "a.jsonl").write_bytes(LINES)
    assert read(tmp_path) == (["a", "b"], {})


def test_undecodable_names_are_escaped_in_the_manifest(tmp_path, tokenizer_file):
    """Undecodable bytes and control characters in names of read files and of ignored files are escaped."""
    raw = tmp_path / "raw"
    raw.mkdir()
    content = "".join(record("C4", text(number)) + "\n" for number in range(20)).encode()
    (raw / "\udcff\x1b.jsonl").write_bytes(content + b"{broken\n")
    (raw / "notes.\udcfe").write_bytes(b"")
    manifest = prepare(
        options(raw, tmp_path / "out", tokenizer_file, train_domains=["C4"], test_domains=[], on_error="skip")
    )
    (skipped,) = manifest.skipped
    assert skipped.file == f"{raw}/\\udcff\\x1b.jsonl"
    assert manifest.provenance["not_read"][0]["examples"] == ["notes.\\udcfe"]
    assert sum(entry.documents for entry in manifest.domains) == 20
    json.dumps(manifest.provenance, ensure_ascii=False).encode()
