from pathlib import Path

import numpy as np
import pytest
from datatrove.io import get_datafolder
from pipelines import Given, document, read

from data_prep.deduplication import keys
from data_prep.deduplication.keys import DocumentKeys, WriteKeys, document_key, read_keys
from megatron_ext.utils.errors import UserError

TASKS = 3


@pytest.fixture(params=["disk", "url"])
def folder(request, tmp_path: Path) -> str:
    return str(tmp_path / "keys") if request.param == "disk" else f"memory://{tmp_path.name}"


@pytest.mark.parametrize("number", [0, 2, 20])
def test_keys_are_in_document_order(folder, monkeypatch, number):
    monkeypatch.setattr(keys, "KEY_BLOCK", 3)
    documents = [document("", f"f:{i}", ("test", "train", "validation")[i % 3]) for i in range(number)]
    passed = read([Given(documents), WriteKeys(folder)], TASKS)
    expected = [[document_key(given) for given in documents[task::TASKS]] for task in range(TASKS)]
    in_order = [key for of_task in expected for key in of_task]
    assert [document_key(given) for given in passed] == in_order
    data_folder = get_datafolder(folder)
    assert [list(read_keys(data_folder, task)) for task in range(TASKS)] == expected
    everything = DocumentKeys(data_folder, TASKS)
    assert len(everything) == number
    for start in range(number):
        for end in range(start, number + 3):
            assert everything.read_range(start, end).tolist() == in_order[start:end]


def test_document_indices(tmp_path):
    for task, number in enumerate((2, 0, 3)):
        (tmp_path / f"{task:05d}.keys").write_bytes(bytes(8 * number))
    everything = DocumentKeys(get_datafolder(str(tmp_path)), TASKS)
    assert everything.document_indices(np.array([2, 0, 0, 2]), np.array([0, 0, 1, 2])).tolist() == [2, 0, 1, 4]
    for task, position in ((0, 2), (1, 0), (3, 0)):
        with pytest.raises(UserError, match=f"has no key for document {position} of task {task}"):
            everything.document_indices(np.array([0, task]), np.array([0, position]))
    with pytest.raises(UserError, match="does not contain exactly the files of 2 tasks"):
        DocumentKeys(get_datafolder(str(tmp_path)), 2)
