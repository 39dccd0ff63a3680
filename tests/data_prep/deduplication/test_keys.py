from pathlib import Path

import numpy as np
import pytest
from datatrove.io import get_datafolder
from pipelines import Given, document, read

from data_prep.deduplication import keys
from data_prep.deduplication.keys import AllKeys, WriteKeys, key_of, keys_of
from megatron_ext.utils.errors import UserError

TASKS = 3


@pytest.fixture(params=["disk", "url"])
def folder(request, tmp_path: Path) -> str:
    return str(tmp_path / "keys") if request.param == "disk" else f"memory://{tmp_path.name}"


@pytest.mark.parametrize("number", [0, 2, 20])
def test_keys_in_pieces_are_those_of_the_documents_in_their_order(folder, monkeypatch, number):
    monkeypatch.setattr(keys, "KEYS_AT_A_TIME", 3)
    documents = [document("", f"f:{i}", ("test", "train", "validation")[i % 3]) for i in range(number)]
    passed = read([Given(documents), WriteKeys(folder)], TASKS)
    expected = [[key_of(given) for given in documents[task::TASKS]] for task in range(TASKS)]
    in_order = [key for of_task in expected for key in of_task]
    assert [key_of(given) for given in passed] == in_order
    there = get_datafolder(folder)
    assert [list(keys_of(there, task)) for task in range(TASKS)] == expected
    everything = AllKeys(there, TASKS)
    assert len(everything) == number
    for start in range(number):
        for end in range(start, number + 3):
            assert everything.between(start, end).tolist() == in_order[start:end]


def test_documents_are_numbered_one_task_after_the_other(tmp_path):
    for task, number in enumerate((2, 0, 3)):
        (tmp_path / f"{task:05d}.keys").write_bytes(bytes(8 * number))
    everything = AllKeys(get_datafolder(str(tmp_path)), TASKS)
    assert everything.numbers(np.array([2, 0, 0, 2]), np.array([0, 0, 1, 2])).tolist() == [2, 0, 1, 4]
    for task, place in ((0, 2), (1, 0), (3, 0)):
        with pytest.raises(UserError, match=f"has no key for document {place} of task {task}"):
            everything.numbers(np.array([0, task]), np.array([0, place]))
    with pytest.raises(UserError, match="does not contain exactly the files of 2 tasks"):
        AllKeys(get_datafolder(str(tmp_path)), 2)
