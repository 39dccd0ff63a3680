from pathlib import Path

import pytest

from megatron_ext.utils.errors import UserError
from megatron_ext.utils.untrusted_paths import check_relative_path, path_within

BAD = [
    "",
    ".",
    "./",
    "/etc/passwd",
    "//host/share",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "./../x",
    "~/x",
    "~root/x",
    "C:/x",
    "c:x",
    "a\\b",
    "..\\x",
    "s3://bucket/x",
    "a/s3://bucket",
    "a\nb",
    "a\x00b",
    "\x1b[31mred",
    "a\u202eb",
    "a\u2028b",
    "a\x85b",
    "a\x7f",
    "\ud800",
    "x" * 256,
    "y/" * 600,
    None,
    3,
    ["a"],
    b"a",
]


@pytest.mark.parametrize("name", BAD, ids=lambda name: ascii(name)[:24])
def test_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"^manifest\.json: names .*, which .*; use only files") as caught:
        path_within(tmp_path, name, "manifest.json")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/C4/000000.tar", "train/C4/000000.tar"),
        ("./a//b/./c", "a/b/c"),
        ("..a/b..", "..a/b.."),
        ("Wörter/文 1 $(x) `y` 'z' %j -n.tar", "Wörter/文 1 $(x) `y` 'z' %j -n.tar"),
        ("-rf", "-rf"),
        ("C++: The Book", "C++: The Book"),
        ("x" * 255, "x" * 255),
    ],
)
def test_accepted(tmp_path, name, expected):
    assert check_relative_path(name, "f") == expected
    assert path_within(tmp_path, name, "f") == tmp_path / expected


def test_links(tmp_path):
    """Links inside or to the folder are accepted. Links out of it are refused, at any path component."""
    folder, outside = tmp_path / "real", tmp_path / "outside"
    (folder / "inner").mkdir(parents=True)
    outside.mkdir()
    (outside / "x").write_text("secret")
    (folder / "alias").symlink_to("inner")
    (folder / "out").symlink_to(outside)
    (folder / "file").symlink_to(outside / "x")
    (folder / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(folder)
    assert path_within(folder, "alias/new", "f") == folder / "alias" / "new"
    assert path_within(tmp_path / "link", "inner/x", "f") == tmp_path / "link" / "inner" / "x"
    for name in ("out/x", "out/new", "file", "dangling"):
        with pytest.raises(UserError, match=r"^f: names .*a link leads out of"):
            path_within(folder, name, "f")
        assert path_within(folder, name, "f", follow_links=True) == folder / name


def test_folder_need_not_exist():
    assert path_within(Path("not/there"), "a/b", "f") == Path("not/there/a/b")
