import random
import struct
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from pipelines import document

from data_prep.deduplication.survivors import ChooseSurvivors, key_of

LEVELS = ("test", "validation", "train")


def test_the_key_orders_splits_first():
    keys = {split: [key_of(document("", f"f:{i}", split)) for i in range(500)] for split in LEVELS}
    assert max(keys["test"]) < min(keys["validation"])
    assert max(keys["validation"]) < min(keys["train"])
    assert all(len(set(found)) == 500 and max(found) < 2**64 for found in keys.values())
    assert key_of(document("a", "f:1")) == key_of(document("b", "f:1"))


def brute_force(keys: dict[tuple[int, int], int], buckets: list[list[list[tuple[int, int]]]]) -> set[tuple[int, int]]:
    """Documents that go: a search from each one over all pairs, through splits as protected as its own only."""
    linked: dict[tuple[int, int], set] = {node: set() for node in keys}
    for groups in buckets:
        for group in groups:
            for a, b in combinations(group, 2):
                linked[a].add(b)
                linked[b].add(a)
    gone = set()
    for node in keys:
        reached, todo = {node}, [node]
        while todo:
            for other in linked[todo.pop()] - reached:
                if keys[other] >> 62 <= keys[node] >> 62:
                    reached.add(other)
                    todo.append(other)
        if min(keys[other] for other in reached) < keys[node]:
            gone.add(node)
    return gone


@pytest.mark.parametrize("seed", range(12))
def test_who_goes_is_what_a_search_through_all_pairs_says(tmp_path: Path, seed: int):
    """Pairs as datatrove writes them: within each bucket, a chain through each group in any order."""
    generator = random.Random(seed)
    tasks = generator.choice([1, 3, 4])
    lengths = [generator.choice([0, 20, 50]) if task else 30 for task in range(tasks)]
    nodes = [(task, i) for task in range(tasks) for i in range(lengths[task])]
    keys = {node: generator.randrange(3) << 62 | generator.randrange(2**62) for node in nodes}
    buckets = []
    for bucket in range(3):
        some = generator.sample(nodes, len(nodes) // 2)
        cuts = sorted({0, len(some), *(generator.randrange(len(some)) for _ in range(len(some) // 2))})
        buckets.append([some[a:b] for a, b in pairwise(cuts) if b > a + 1])
        pairs = [(*a, *b) for group in buckets[-1] for a, b in pairwise(group)]
        (tmp_path / "pairs").mkdir(exist_ok=True)
        (tmp_path / "pairs" / f"{bucket:05d}_00.dups").write_bytes(b"".join(struct.pack("<4I", *p) for p in pairs))
    (tmp_path / "keys").mkdir()
    for task in range(tasks):
        of_task = np.array([keys[task, i] for i in range(lengths[task])], np.uint64)
        (tmp_path / "keys" / f"{task:05d}.keys").write_bytes(of_task.tobytes())
    step = ChooseSurvivors(*(str(tmp_path / name) for name in ("pairs", "keys", "removed")), tasks)
    step.run()
    found = []
    for task in range(tasks):
        content = (tmp_path / "removed" / f"{task:06d}.remove").read_bytes()
        found += [(task, number) for (number,) in struct.iter_unpack("<I", content)]
    gone = brute_force(keys, buckets)
    assert found == sorted(gone)
    counted = {name: metric.total for name, metric in step.stats.stats.items()}
    assert counted["removed"] == len(gone)
    assert counted["removed_test"] == sum(keys[node] >> 62 == 0 for node in gone)
