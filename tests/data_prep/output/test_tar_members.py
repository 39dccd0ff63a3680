"""Tar members and the arrays in them, compared with those that webdataset and NumPy write."""

import io

import numpy as np
import pytest
import webdataset

from data_prep.output.tar_members import npy_bytes, tar_end, tar_member


@pytest.mark.parametrize("sizes", [[], [0], [1, 511, 512, 513], [9000], [3 * 512] * 5 + [7], [8192], [7680, 0]])
def test_tar_equals_webdataset(sizes):
    theirs, ours = io.BytesIO(), b""
    writer = webdataset.TarWriter(theirs, encoder=False, mtime=0, user="selectron", group="selectron", mode=0o644)
    for number, size in enumerate(sizes):
        content = bytes(range(256)) * (size // 256 + 1)
        name = f"00003-{number:09d}"
        writer.write({"__key__": name, "tokens.npy": content[:size]})
        ours += tar_member(f"{name}.tokens.npy".encode(), content[:size])
    writer.close()
    assert ours + tar_end(len(ours)) == theirs.getvalue()


@pytest.mark.parametrize("dtype", ["<u2", "<u4", "<i8"])
@pytest.mark.parametrize("length", [0, 1, 9, 10, 123456])
def test_array_equals_numpy(dtype, length):
    array = np.arange(length).astype(dtype)
    theirs = io.BytesIO()
    np.lib.format.write_array(theirs, array, version=(1, 0), allow_pickle=False)
    assert npy_bytes(array) == theirs.getvalue()
