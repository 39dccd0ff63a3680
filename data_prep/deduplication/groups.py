"""Conversion of datatrove's duplicate pairs to links between documents with keys, in constant memory.

datatrove writes a group of equal signatures as pairs (a, b), (b, c), ..., in an order that is independent of splits.
Here, the documents of a group are linked so that no path between two of its test documents contains a validation or
training document, and no path between two validation documents contains a training document. In each block of rows,
every document is linked to the smallest document of its group in the block. That document is linked to the smallest
document of the group in all earlier blocks. There are two passes: the first attaches the keys by ranges of documents,
because keys are read in order. The second links the documents by ranges of groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from datatrove.io import DataFolder

from data_prep.contamination.ngrams import Hashes
from data_prep.deduplication.elimination import Links
from data_prep.deduplication.keys import HASH_BITS, SPLIT_PRIORITY, DocumentKeys
from data_prep.deduplication.partitions import Partitions

_PAIR_BYTES = 16
_NONE = np.uint64(2**64 - 1)
"""Sentinel that is larger than every key."""


def link_groups(pairs: DataFolder, keys: DocumentKeys, scratch: Path, block: int) -> tuple[Links, list[int]]:
    """Link the documents of each group. Return the links, and per split the number of documents in any group.

    Args:
        pairs: output folder of datatrove's `MinhashDedupBuckets`.
        keys: keys of all documents.
        scratch: folder for temporary files, 56 bytes for each membership of a document in a group.
        block: maximum number of rows, documents or groups in memory at once.
    """
    members = Partitions(scratch / "members", 2, block)
    groups = 0
    for name in sorted(pairs.list_files(glob_pattern="*.dups")):
        for found in _read_members(pairs, name, keys, groups, block):
            members.add(found, found[:, 0] // np.uint64(block))
            groups = int(found[-1, 1]) + 1
    keyed_members = Partitions(scratch / "groups", 3, block)
    counts: Counter[int] = Counter()
    for start in range(0, len(keys), block):
        counts.update(_attach_keys(members, keyed_members, keys, start, block))
    splits = [counts[level] for level in range(len(SPLIT_PRIORITY))]
    links = Links(scratch / "links", splits, block)
    for group_range in range(-(-groups // block)):
        smallest = np.full((block, 2), _NONE)
        for rows in keyed_members.drain(group_range):
            links.add(_build_links(rows, smallest, group_range * block))
    return links, splits


def _read_members(pairs: DataFolder, name: str, keys: DocumentKeys, groups: int, block: int) -> Iterator[Hashes]:
    """Yield (document index, group index) of the documents in a file of pairs, shape (rows, 2).

    The first group of the file has the index `groups`.
    """
    last = (-1, -1)
    group = groups - 1
    with pairs.open(name, "rb") as file:
        while content := file.read(block * _PAIR_BYTES):
            rows = np.frombuffer(content, "<u4").reshape(-1, 4).astype(np.int64)
            previous = np.concatenate([[last], rows[:-1, 2:]])
            is_first = (rows[:, :2] != previous).any(axis=1)
            row_groups = group + np.cumsum(is_first)
            first, second = (keys.document_indices(rows[:, i], rows[:, i + 1]) for i in (0, 2))
            documents = np.concatenate([first[is_first], second])
            group_indices = np.concatenate([row_groups[is_first], row_groups]).astype(np.uint64)
            yield np.stack([documents, group_indices], axis=1)
            last, group = (int(rows[-1, 2]), int(rows[-1, 3])), int(row_groups[-1])


def _attach_keys(members: Partitions, target: Partitions, keys: DocumentKeys, start: int, block: int) -> dict[int, int]:
    """Add rows (group index, key, document index) to `target` for the members in a range of documents.

    Returns:
        The number of documents with a group, by split (index in `SPLIT_PRIORITY`).
    """
    keys_in_range: Hashes | None = None
    seen = np.zeros(block, np.bool_)
    for rows in members.drain(start // block):
        if keys_in_range is None:
            keys_in_range = keys.read_range(start, start + block)
        positions = rows[:, 0] - np.uint64(start)
        seen[positions] = True
        target.add(np.stack([rows[:, 1], keys_in_range[positions], rows[:, 0]], axis=1), rows[:, 1] // np.uint64(block))
    if keys_in_range is None:
        return {}
    splits, counts = np.unique(keys_in_range[seen[: len(keys_in_range)]] >> np.uint64(HASH_BITS), return_counts=True)
    return dict(zip(splits.tolist(), counts.tolist(), strict=True))


def _build_links(rows: Hashes, smallest: Hashes, start: int) -> Hashes:
    """Return links for a block of rows, shape (links, 4), as in `Links.add`.

    Every document is linked to the smallest document of its group in the block, and that document to the smallest
    document of the group in earlier blocks.

    Args:
        rows: (group index, key, document index), shape (rows, 3).
        smallest: key and index of each group's smallest document so far, shape (groups, 2); updated in place.
        start: index of the first group in the range.
    """
    rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    is_first = np.concatenate([[True], rows[1:, 0] != rows[:-1, 0]])
    firsts = rows[is_first]
    within = np.concatenate([rows[:, 1:], firsts[np.cumsum(is_first) - 1, 1:]], axis=1)
    groups, first = firsts[:, 0] - np.uint64(start), firsts[:, 1:]
    before = smallest[groups]
    smaller = (first[:, 0] < before[:, 0]) | ((first[:, 0] == before[:, 0]) & (first[:, 1] < before[:, 1]))
    low, high = np.where(smaller[:, None], (first, before), (before, first))
    smallest[groups] = low
    across = np.concatenate([high, low], axis=1)[before[:, 0] != _NONE]
    links = np.concatenate([within, across])
    return links[(links[:, :2] != links[:, 2:]).any(axis=1)]
