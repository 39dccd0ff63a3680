import multiprocessing
import os
import signal

import numpy as np
import pytest
from datatrove.io import get_datafolder

from data_prep.contamination import runs
from data_prep.contamination.arrays import load_array, load_json, open_array_writer, save_array, save_json

generator = np.random.default_rng(5)


@pytest.fixture(params=["disk", "url"])
def folder(request, tmp_path):
    return get_datafolder(str(tmp_path / "arrays") if request.param == "disk" else f"memory://{tmp_path.name}")


def test_rows_that_are_appended_are_a_plain_numpy_file(folder):
    pair = np.dtype([("hash", "<u8"), ("task", "<u4")])
    for dtype, name in ((np.uint64, "plain.npy"), (pair, "deep/pairs.npy")):
        rows = generator.integers(0, 256, 999 * np.dtype(dtype).itemsize, np.uint8).view(dtype)
        with open_array_writer(folder, name, dtype) as append:
            for start, end in ((0, 1), (1, 1), (1, 700), (700, 999)):
                append(rows[start:end])
        with folder.open(name, "rb") as file:
            there = np.load(file)
        assert there.dtype == np.dtype(dtype)
        assert there.tobytes() == rows.tobytes() == load_array(folder, name).tobytes()


def test_an_array_without_rows(folder):
    save_array(folder, "none.npy", np.empty(0, np.uint64))
    assert load_array(folder, "none.npy").shape == (0,)


def test_json_round_trip(folder):
    save_json(folder, "facts.json", {"é": [1, None]})
    assert load_json(folder, "facts.json") == {"é": [1, None]}


def append_what_is_no_number(path):
    with open_array_writer(get_datafolder(str(path)), "a.npy", np.int64) as append:
        append(np.arange(1000))
        append(np.array(["no number"]))


def test_interrupted_write_keeps_the_previous_file(tmp_path):
    before = np.arange(3)
    save_array(get_datafolder(str(tmp_path)), "a.npy", before)
    with pytest.raises(ValueError, match="invalid literal"):
        append_what_is_no_number(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]
    assert np.load(tmp_path / "a.npy").tolist() == [0, 1, 2]


def killed_while_it_writes(path):
    with open_array_writer(get_datafolder(path), "runs/00000-00001.npy", np.uint64) as append:
        append(np.arange(100_000, dtype=np.uint64))
        os.kill(os.getpid(), signal.SIGKILL)


def test_partial_files_are_not_runs(tmp_path):
    folder = get_datafolder(str(tmp_path))
    save_array(folder, "runs/00000-00000.npy", np.array([7], np.uint64))
    task = multiprocessing.get_context("fork").Process(target=killed_while_it_writes, args=(str(tmp_path),))
    task.start()
    task.join()
    assert task.exitcode == -signal.SIGKILL
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert runs.run_names(folder, "runs", 1) == [["runs/00000-00000.npy"]]


@pytest.mark.parametrize("run_hashes", [1, 37, 10_000])
def test_merged_runs_are_the_set_of_all_hashes(folder, monkeypatch, run_hashes):
    monkeypatch.setattr(runs, "RUN_HASHES", run_hashes)
    everything: set[int] = {0, 2**64 - 1}
    for task in range(3):
        writer = runs.RunWriter(folder, "runs", task)
        for number in range(4 if task < 2 else 0):
            hashes = generator.integers(0, 2**64, 7 * number, np.uint64)
            hashes = np.concatenate([hashes, hashes[::-2], np.array([0, 2**64 - 1], np.uint64)])
            everything |= set(hashes.tolist())
            writer.add(hashes)
        writer.close()
    assert runs.merge_runs(folder, "runs", 3, folder, "all.npy") == len(everything)
    assert load_array(folder, "all.npy").tolist() == sorted(everything)


def test_task_without_a_run_is_an_error(tmp_path):
    folder = get_datafolder(str(tmp_path))
    runs.RunWriter(folder, "runs", 0).close()
    with pytest.raises(FileNotFoundError, match="no runs of task 1"):
        runs.merge_runs(folder, "runs", 2, folder, "all.npy")
