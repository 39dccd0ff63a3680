import random
import struct
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from datatrove.io import get_datafolder
from pipelines import document

from data_prep.deduplication.keys import document_key
from data_prep.deduplication.survivors import MAX_BLOCK_ROWS, ChooseSurvivors
from megatron_ext.utils.errors import UserError

LEVELS = ("test", "validation", "train")
Node = tuple[int, int]
Buckets = list[list[list[Node]]]


def test_the_key_orders_splits_first():
    keys = {split: [document_key(document("", f"f:{i}", split)) for i in range(500)] for split in LEVELS}
    assert max(keys["test"]) < min(keys["validation"])
    assert max(keys["validation"]) < min(keys["train"])
    assert all(len(set(found)) == 500 and max(found) < 2**64 for found in keys.values())
    assert document_key(document("a", "f:1")) == document_key(document("b", "f:1"))


def brute_force(keys: dict[Node, int], buckets: Buckets) -> list[Node]:
    """Return the removed documents.

    For each split, connected components are computed in memory, over documents of equally or more protected splits.
    """
    removed = []
    for level in range(3):
        parent = {node: node for node in keys}

        def root(node: Node, parent: dict[Node, Node] = parent) -> Node:
            while parent[node] != node:
                parent[node] = node = parent[parent[node]]
            return node

        for group in (group for groups in buckets for group in groups):
            for a, b in pairwise(node for node in group if keys[node] >> 62 <= level):
                low, high = sorted((root(a), root(b)), key=lambda node: (keys[node], node))
                parent[high] = low
        removed += [node for node in keys if keys[node] >> 62 == level and root(node) != node]
    return sorted(removed)


def write(folder: Path, keys: dict[Node, int], buckets: Buckets, tasks: int) -> None:
    """Write pairs as datatrove does: for each bucket, a chain through every group in any order."""
    for name in ("pairs", "keys"):
        (folder / name).mkdir(parents=True)
    for bucket, groups in enumerate(buckets):
        rows = [(*a, *b) for group in groups for a, b in pairwise(group)]
        (folder / "pairs" / f"{bucket:05d}_00.dups").write_bytes(b"".join(struct.pack("<4I", *row) for row in rows))
    for task in range(tasks):
        of_task = np.array([keys[node] for node in sorted(keys) if node[0] == task], np.uint64)
        (folder / "keys" / f"{task:05d}.keys").write_bytes(of_task.tobytes())


def choose(folder: Path, tasks: int, block: int = MAX_BLOCK_ROWS) -> tuple[list[Node], dict[str, float]]:
    """Run `ChooseSurvivors`, and return the documents it removed and its counts."""
    step = ChooseSurvivors(*(str(folder / name) for name in ("pairs", "keys", "removed")), tasks, block)
    step.run()
    found = []
    for task in range(tasks):
        content = (folder / "removed" / f"{task:06d}.remove").read_bytes()
        found += [(task, number) for (number,) in struct.iter_unpack("<I", content)]
    return found, {name: metric.total for name, metric in step.stats.stats.items()}


def some_keys(lengths: list[int], generator: random.Random) -> dict[Node, int]:
    nodes = [(task, i) for task, length in enumerate(lengths) for i in range(length)]
    return {node: generator.randrange(3) << 62 | generator.randrange(2**62) for node in nodes}


def some_groups(nodes: list[Node], generator: random.Random) -> Buckets:
    buckets = []
    for _ in range(3):
        some = generator.sample(nodes, len(nodes) // 2)
        cuts = sorted({0, len(some), *(generator.randrange(len(some)) for _ in range(len(some) // 2))})
        buckets.append([some[a:b] for a, b in pairwise(cuts) if b > a + 1])
    return buckets


@pytest.mark.parametrize("block", [1, 2, 7, 40, MAX_BLOCK_ROWS])
@pytest.mark.parametrize("seed", range(6))
def test_removed_documents_equal_brute_force(tmp_path: Path, seed: int, block: int):
    generator = random.Random(seed)
    tasks = generator.choice([1, 3, 4])
    keys = some_keys([generator.choice([0, 20, 50]) if task else 30 for task in range(tasks)], generator)
    buckets = some_groups(list(keys), generator)
    write(tmp_path, keys, buckets, tasks)
    found, counted = choose(tmp_path, tasks, block)
    removed = brute_force(keys, buckets)
    assert found == removed
    assert counted["duplicates"] == len({node for groups in buckets for group in groups for node in group})
    assert counted["removed"] == len(removed)
    for level, split in enumerate(LEVELS):
        assert counted[f"removed_{split}"] == sum(keys[node] >> 62 == level for node in removed)
    assert {path.name for path in tmp_path.iterdir()} == {"pairs", "keys", "removed"}


def chain(nodes: list[Node], _: random.Random) -> Buckets:
    links = [list(pair) for pair in pairwise(nodes)]
    return [links[::2], links[1::2]]


def ordered_chain(nodes: list[Node], _: random.Random) -> Buckets:
    return chain(sorted(nodes), _)


def loop(nodes: list[Node], _: random.Random) -> Buckets:
    return [*chain(nodes, _), [[nodes[-1], nodes[0]]]]


def star(nodes: list[Node], _: random.Random) -> Buckets:
    return [[[nodes[0], node]] for node in nodes[1:40]] + [[[nodes[7], node] for node in nodes[40:]]]


def clique(nodes: list[Node], _: random.Random) -> Buckets:
    return [[nodes], [nodes[::-1]]]


def tight_groups(nodes: list[Node], _: random.Random) -> Buckets:
    """Groups of four that repeat in every bucket."""
    return [[nodes[i : i + 4] for i in range(0, len(nodes), 4)]] * 8


def loose_groups(nodes: list[Node], generator: random.Random) -> Buckets:
    """Random pairs, which connect nearly all documents along many paths."""
    return [[generator.sample(nodes, 2) for _ in nodes] for _ in range(3)]


@pytest.mark.parametrize("shape", [chain, ordered_chain, loop, star, clique, tight_groups, loose_groups])
@pytest.mark.parametrize("block", [150, MAX_BLOCK_ROWS])
def test_large_graphs_of_any_shape(tmp_path: Path, shape: Callable[[list[Node], random.Random], Buckets], block: int):
    """3,000 documents, with 150 of them in memory at a time or with all."""
    generator = random.Random(shape.__name__)
    keys = some_keys([1000, 0, 2000], generator)
    nodes = generator.sample(list(keys), 2400)
    buckets = shape(nodes, generator)
    write(tmp_path, keys, buckets, 3)
    found, _ = choose(tmp_path, 3, block)
    assert found == brute_force(keys, buckets)


@pytest.mark.parametrize("level", range(3))
def test_long_chain(tmp_path: Path, level: int):
    generator = random.Random(level)
    keys = {node: level << 62 | key & (2**62 - 1) for node, key in some_keys([1500], generator).items()}
    write(tmp_path, keys, chain(generator.sample(list(keys), 1500), generator), 1)
    found, _ = choose(tmp_path, 1, 60)
    assert [node for node in keys if node not in set(found)] == [min(keys, key=keys.__getitem__)]


@pytest.mark.parametrize("block", [3, 1000])
def test_equal_keys_keep_the_earlier_document(tmp_path: Path, block: int):
    keys = {(task, i): i % 2 << 62 | 5 for task in range(2) for i in range(10)}
    buckets = [[[(1, 2), (0, 2), (0, 4)], [(1, 3), (0, 9)], [(1, 4), (1, 5)]]]
    write(tmp_path, keys, buckets, 2)
    found, _ = choose(tmp_path, 2, block)
    assert found == brute_force(keys, buckets) == [(0, 4), (1, 2), (1, 3), (1, 5)]


def test_survivors_do_not_depend_on_the_number_of_tasks(tmp_path: Path):
    """Document i is document i // n of task i % n for n tasks."""
    generator = random.Random(4)
    keys = some_keys([120], generator)
    buckets = some_groups(list(keys), generator)
    chosen = []
    for tasks in (1, 4):
        placed = {node: (node[1] % tasks, node[1] // tasks) for node in keys}
        of_tasks = [[[placed[node] for node in group] for group in groups] for groups in buckets]
        write(tmp_path / str(tasks), {placed[node]: key for node, key in keys.items()}, of_tasks, tasks)
        found, _ = choose(tmp_path / str(tasks), tasks, 16)
        chosen.append(sorted(place * tasks + task for task, place in found))
    assert chosen[0] == chosen[1]


def test_scratch_files_of_a_killed_run_are_ignored(tmp_path: Path):
    generator = random.Random(9)
    keys = some_keys([60], generator)
    buckets = some_groups(list(keys), generator)
    write(tmp_path, keys, buckets, 1)
    for name in ("members", "groups", "links", "gone"):
        (tmp_path / "removed.scratch" / name).mkdir(parents=True)
        (tmp_path / "removed.scratch" / name / "000000").write_bytes(bytes(96))
    assert choose(tmp_path, 1, 8)[0] == brute_force(keys, buckets)
    assert not (tmp_path / "removed.scratch").exists()


def test_remote_folders(tmp_path: Path):
    generator = random.Random(3)
    keys = some_keys([30, 30], generator)
    buckets = some_groups(list(keys), generator)
    write(tmp_path / "disk", keys, buckets, 2)
    expected, _ = choose(tmp_path / "disk", 2)
    address = f"memory://{tmp_path.name}"
    remote = get_datafolder(address)
    for path in tmp_path.glob("disk/[pk]*/*"):
        with remote.open(f"{path.parent.name}/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    ChooseSurvivors(*(f"{address}/{name}" for name in ("pairs", "keys", "removed")), 2, 8).run()
    found = []
    for task in range(2):
        with remote.open(f"removed/{task:06d}.remove", "rb") as file:
            found += [(task, number) for (number,) in struct.iter_unpack("<I", file.read())]
    assert found == expected


def test_an_error_leaves_no_files_behind(tmp_path: Path):
    write(tmp_path, {(0, 0): 1, (0, 1): 2}, [[[(0, 0), (0, 1), (0, 2)]]], 1)
    with pytest.raises(UserError, match="has no key for document 2 of task 0"):
        choose(tmp_path, 1)
    assert {path.name for path in tmp_path.iterdir()} == {"pairs", "keys"}


@pytest.mark.parametrize("buckets", [[], [[]]])
def test_no_duplicates(tmp_path: Path, buckets: Buckets):
    write(tmp_path, some_keys([3, 0], random.Random(1)), buckets, 2)
    found, counted = choose(tmp_path, 2)
    assert found == []
    assert counted["duplicates"] == counted["removed"] == 0
