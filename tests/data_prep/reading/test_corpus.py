"""Files of a corpus: URLs, links, and bounds on their number."""

import errno
import os

import fsspec
import pytest
import zstandard
from prep_fakes import lines, record, text, write_jsonl
from read_documents import read

from data_prep.reading.corpus import open_files
from data_prep.tokenization.vocabularies import open_tokenizer
from megatron_ext.utils.errors import UserError


@pytest.mark.parametrize("protocol", ["memory", "file"])
def test_urls(protocol, tmp_path):
    base = "memory://raw" if protocol == "memory" else (tmp_path / "raw").as_uri()
    content = lines(["C4", "ArXiv"], 5)
    for folder in ("train", "test"):
        with fsspec.open(f"{base}/{folder}/chunk1/x.jsonl.zst", "wb", auto_mkdir=True) as file:
            file.write(zstandard.compress("\n".join(content).encode()))
    documents, _, (bytes_reported, total) = read(base)
    assert len(documents) == 20
    assert documents[0].id == "test/chunk1/x.jsonl.zst:1"
    assert {item.folder for item in documents} == {"train", "test"}
    assert bytes_reported == total > 0
    before = open_files(base).identity()
    with fsspec.open(f"{base}/train/chunk1/y.jsonl", "wb") as file:
        file.write(content[0].encode())
    assert open_files(base).identity() != before


def names_of(source):
    return [item.id for item in read(source)[0]]


def test_links_are_followed_in_the_order_of_names(tmp_path):
    """Large corpora are often folders of links to the disks of their chunks."""
    for number in range(3):
        write_jsonl(tmp_path / f"disk{number}/deep/x.jsonl", [record("C4", text(number))])
    raw = tmp_path / "raw/train"
    write_jsonl(raw / "b/x.jsonl", [record("C4", text("own"))])
    (raw / "c").symlink_to(tmp_path / "disk1")
    (raw / "a").symlink_to(tmp_path / "disk0", target_is_directory=True)
    (raw / "d.jsonl").symlink_to(tmp_path / "disk2/deep/x.jsonl")
    expected = ["train/a/deep/x.jsonl:1", "train/b/x.jsonl:1", "train/c/deep/x.jsonl:1", "train/d.jsonl:1"]
    assert names_of(tmp_path / "raw") == expected
    (tmp_path / "linked").symlink_to(tmp_path / "raw")
    assert names_of(tmp_path / "linked") == expected
    before = open_files(tmp_path / "raw").identity()
    write_jsonl(tmp_path / "disk0/deep/x.jsonl", [record("C4", text("another"))])
    assert open_files(tmp_path / "raw").identity() != before


def test_links_in_a_circle_end(tmp_path):
    write_jsonl(tmp_path / "raw/a/x.jsonl", [record("C4", "x")])
    write_jsonl(tmp_path / "other/y.jsonl", [record("C4", "y")])
    (tmp_path / "raw/a/up").symlink_to("..")
    (tmp_path / "raw/a/itself").symlink_to(".")
    (tmp_path / "raw/other").symlink_to(tmp_path / "other")
    (tmp_path / "other/back").symlink_to(tmp_path / "raw/a")  # "raw/other" does not lie within this folder
    assert names_of(tmp_path / "raw") == ["a/x.jsonl:1", "other/back/x.jsonl:1", "other/y.jsonl:1"]


def test_two_links_to_one_folder_are_two_domains(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/x.txt").write_text("x")
    for name in ("Law", "Book"):
        (tmp_path / "raw" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "raw" / name).symlink_to(tmp_path / "disk")
    assert [item.domain for item in read(tmp_path / "raw")[0]] == ["Book", "Law"]


@pytest.mark.parametrize("target", ["gone.jsonl", "a.jsonl"])
def test_broken_link_is_rejected(tmp_path, target):
    write_jsonl(tmp_path / "raw/train/x.jsonl", [record("C4", "x")])
    (tmp_path / "raw/.#notes").symlink_to("someone@somewhere")
    assert names_of(tmp_path / "raw") == ["train/x.jsonl:1"]
    (tmp_path / "raw/train/a.jsonl").symlink_to(target)
    with pytest.raises(UserError, match=r"raw/train/a\.jsonl: is a broken link; fix it or remove it$"):
        open_files(tmp_path / "raw")


def test_unreadable_folder_is_an_error(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "x.jsonl", [record("C4", "x")])
    (tmp_path / "closed").mkdir()
    scan = os.scandir

    def refusing(path):
        if path == tmp_path / "closed":
            raise PermissionError(errno.EACCES, "not yours", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError):
        open_files(tmp_path)


def test_urls_of_this_machine_are_its_paths(tmp_path, tokens, tokenizer_file):
    """file:// URLs support links and Megatron files, unlike other URLs."""
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/linked").symlink_to(tokens)
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    documents, _, _ = read((tmp_path / "raw").as_uri(), **given)
    assert documents == read(tmp_path / "raw", **given)[0]
    assert open_files((tmp_path / "raw").as_uri(), **given).files == open_files(tmp_path / "raw", **given).files


def test_invalid_input_urls():
    with pytest.raises(UserError, match=r"^--input: memory://absent does not exist; "):
        open_files("memory://absent")
    with pytest.raises(UserError, match=r"^--input: nosuch://x cannot be opened \(Protocol not known: nosuch"):
        open_files("nosuch://x")


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_too_many_files(place, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.reading.inputs.MAX_FILES", 3)
    source = str(tmp_path / "texts") if place == "disk" else f"memory://{tmp_path.name}"
    for number in range(3):
        with fsspec.open(f"{source}/a/{number}.txt", "w", auto_mkdir=True) as file:
            file.write(text(number))
    assert open_files(source).units == 3
    with fsspec.open(f"{source}/a/b/3.txt", "w", auto_mkdir=True) as file:
        file.write(text(3))
    with pytest.raises(
        UserError, match=rf"^--input: {source} contains more than 3 files; combine them into JSON lines "
    ):
        open_files(source)
