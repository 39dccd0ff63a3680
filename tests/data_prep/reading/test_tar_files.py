"""Documents of tar files of text, whole and damaged."""

import io
import json
import tarfile

import pytest
from prep_fakes import text
from read_documents import read
from webdataset.tariterators import base_plus_ext

from data_prep.reading.tars import MEMBER_NAME
from megatron_ext.utils.errors import UserError


def tar_of(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def test_tars_of_text(tmp_path):
    facts = json.dumps({"meta": {"redpajama_set_name": "RedPajamaC4"}}).encode()
    whole = json.dumps({"text": "in the record", "domain": "Book"}).encode()
    members = [("a.txt", "naïve".encode()), ("a.json", facts), ("b.json", whole), ("c.txt", b"bare")]
    tar_of(tmp_path / "x.tar", members)
    documents, _, _ = read(tmp_path, domain="Web")
    assert [(item.id, item.text, item.domain) for item in documents] == [
        ("x.tar:a", "naïve", "C4"),
        ("x.tar:b", "in the record", "Book"),
        ("x.tar:c", "bare", "Web"),
    ]


def test_malformed_tar(tmp_path):
    good = [(f"{i}.txt", text(i, 400).encode()) for i in range(9)]
    tar_of(tmp_path / "a.tar", [("x.txt", b"\xff"), ("y.json", b"{"), ("z.jpg", b"x"), *good])
    content = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(UserError, match=r"a\.tar:x: not UTF-8 \(byte 0 of the text\); repair"):
        read(tmp_path, domain="Web")
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert 0 < len(documents) < 9
    assert [item.text for item in documents] == [text(i, 400) for i in range(len(documents))]
    reasons = ("no text", "not JSON", "not UTF-8", "tar broken")
    assert problems.counts == {(str(tmp_path / "a.tar"), reason): 1 for reason in reasons}


def damaged(number):
    """Return a function that flips one bit in the header of a tar member."""
    return lambda tar: tar[: 1024 * number + 3] + bytes([tar[1024 * number + 3] ^ 1]) + tar[1024 * number + 4 :]


@pytest.mark.parametrize(
    ("change", "whole", "message"),
    [
        (lambda tar: tar, 9, ""),
        (lambda tar: tar[: 9 * 1024 + 512], 9, ""),  # one block of zeros instead of the usual two
        (damaged(6), 5, "after sample '4': bad checksum"),
        (lambda tar: tar[: 6 * 1024], 5, "after sample '4': it ends without a closing block of zeros"),
        (lambda tar: tar[: 6 * 1024 + 100], 5, "after sample '4': truncated header"),
        (
            lambda tar: tar + tar,
            9,
            "after sample '8': data follows the end of the tar, and only one tar per file is read",
        ),
    ],
)
def test_data_after_the_end_of_a_tar(tmp_path, change, whole, message):
    """Nine samples, each with a header block and a content block.

    A sample counts as complete only if a valid block follows it.
    """
    tar_of(tmp_path / "a.tar", [(f"{i}.txt", text(i, 10).encode()) for i in range(9)])
    content = (tmp_path / "a.tar").read_bytes()
    assert content[9 * 1024 :].count(0) == len(content) - 9 * 1024 < len(content)
    (tmp_path / "a.tar").write_bytes(change(content))
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert [item.text for item in documents] == [text(i, 10) for i in range(whole)]
    assert problems.counts == ({(str(tmp_path / "a.tar"), "tar broken"): 1} if message else {})
    if message:
        with pytest.raises(UserError) as caught:
            read(tmp_path, domain="Web")
        assert str(caught.value) == f"{tmp_path}/a.tar: tar broken ({message}); repair it or pass --on-error skip"


def test_headers_are_checked_where_tarfile_parses_them_itself(tmp_path, monkeypatch):
    """Security releases of Python call `_frombuf` in place of `frombuf`; older versions are made to do so here."""

    def fromtarfile(cls, tar):
        header = cls._frombuf(tar.fileobj.read(tarfile.BLOCKSIZE), tar.encoding, tar.errors)
        header.offset = tar.fileobj.tell() - tarfile.BLOCKSIZE
        return header._proc_member(tar)

    if not hasattr(tarfile.TarInfo, "_frombuf"):
        monkeypatch.setattr(tarfile.TarInfo, "_frombuf", vars(tarfile.TarInfo)["frombuf"], raising=False)
        monkeypatch.setattr(tarfile.TarInfo, "fromtarfile", classmethod(fromtarfile))
    tar_of(tmp_path / "a.tar", [(f"{i}.txt", text(i, 10).encode()) for i in range(9)])
    (tmp_path / "a.tar").write_bytes(damaged(6)((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(UserError, match="after sample '4': bad checksum"):
        read(tmp_path, domain="Web")


def test_members_that_belong_to_no_sample(tmp_path):
    """Names without a suffix or a key are counted. Members with WebDataset's reserved names are ignored."""
    names = ["README", "0.txt", ".hidden.txt", "in/1.txt", "in/plain", "__meta__/x"]
    tar_of(tmp_path / "a.tar", [(name, name.encode()) for name in names])
    documents, problems, _ = read(tmp_path, "skip", domain="Web")
    assert [item.text for item in documents] == ["0.txt", "in/1.txt"]
    assert problems.counts == {(str(tmp_path / "a.tar"), "not named <key>.<suffix>"): 3}
    with pytest.raises(
        UserError, match=r"a\.tar:README: not named <key>\.<suffix>; repair it or pass --on-error skip$"
    ):
        read(tmp_path, domain="Web")


@pytest.mark.parametrize(
    "name",
    ["a.txt", "a.b.txt", "x.y/a.b.txt", "x.y/a", ".txt", "x/.txt", "x/", "a.", "a", "a.t/b", "a\n.b", "é/ü.x\n"],
)
def test_names_are_split_as_by_webdataset(name):
    found = MEMBER_NAME.match(name)
    assert (found.groups() if found else (None, None)) == base_plus_ext(name)
