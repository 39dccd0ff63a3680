import numpy as np
import pytest
from datatrove.io import get_datafolder

from data_prep.deduplication.partitions import Partitions, scratch_folder_beside


def test_rows_are_drained_by_range_in_blocks(tmp_path):
    generator = np.random.default_rng(2)
    parts = Partitions(tmp_path / "parts", 3, 4)
    rows = generator.integers(0, 2**64, (100, 3), np.uint64)
    ranges = generator.integers(0, 7, 100)
    for start, end in ((0, 0), (0, 1), (1, 60), (60, 100)):
        parts.add(rows[start:end], ranges[start:end])
    for number in range(8):
        blocks = list(parts.drain(number))
        assert all(len(block) <= 4 for block in blocks)
        found = np.concatenate([np.empty((0, 3), np.uint64), *blocks])
        assert found.tolist() == rows[ranges == number].tolist()
        assert not list(parts.drain(number))
    assert not list((tmp_path / "parts").iterdir())


def fail_within(folder):
    with scratch_folder_beside(folder) as scratch:
        (scratch / "file").touch()
        raise RuntimeError("power cut")


@pytest.mark.parametrize("url", [False, True])
def test_scratch_folder_is_created_and_removed(tmp_path, url):
    folder = get_datafolder("memory://results" if url else str(tmp_path / "results"))
    with pytest.raises(RuntimeError, match="power cut"):
        fail_within(folder)
    (tmp_path / "results.scratch").mkdir()
    (tmp_path / "results.scratch" / "left").touch()
    with scratch_folder_beside(folder) as scratch:
        assert not [path for path in scratch.iterdir() if path.name != ".held"]  # a file of the folder itself
        assert (scratch.parent == tmp_path) != url
    assert not scratch.exists()
