"""Which vertices of a graph of any size have a smaller one in their component, in memory of constant size.

Vertices are eliminated from the largest to the smallest, range by range. When it is a vertex's turn, its links lead to
smaller ones alone; if it has none, it is the smallest of its component. If it has some, the smallest of them takes over
its links to the others, so that what is left hangs together as before. This is the node reduction of Dementiev,
Sanders, Schultes and Sibeyn 2004 ("Engineering an external memory minimum spanning tree algorithm", IFIP TCS), for
components, and with a whole range of vertices eliminated at once by a search for components in memory.

Links lie in the file of the range of their larger end, where the range's turn finds them, in blocks. What a block
leaves is a tree for each of its components: a link for each vertex of the range, which is kept for the next block, and
links between smaller vertices, which are written to their files. So there are never more links than at first, whatever
hangs together how. A link goes down a range or more each time it is written: of m links and R ranges, no more than R m
are written. As vertices are ordered by hashes it is far less: 1 to 2.6 m at 100 ranges, for small groups, a chain and
pairs at random.

Levels: a link belongs to the level of its larger end. Vertices are judged by links of no higher levels than their own.
A path from v to a smaller vertex, cut at the first smaller one, has only larger vertices in between; those are of v's
level if none is above it. So links that such an elimination leaves between lower levels are of no use, and are dropped:
two vertices that only a vertex of a higher level links stay apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data_prep.contamination.ngrams import Hashes
from data_prep.deduplication.keys import SPLIT_BIT
from data_prep.deduplication.partitions import Partitions

_FINE_BITS = 30
"""Bits of a hash by which it is dealt to ranges."""


class Links:
    """Links between vertices, each with a key and a number: ordered by key, then by number.

    Args:
        folder: for the links, made here.
        vertices: number of vertices of each level, the level being what a key has from bit 62 on.
        block: vertices a range, about, as keys are hashes; and links read at a time.
    """

    def __init__(self, folder: Path, vertices: Sequence[int], block: int) -> None:
        self._parts = Partitions(folder, 4, block)
        self._ranges = np.array([1 + number // block for number in vertices], np.uint64)
        self._bases = np.cumsum([0, *self._ranges[:-1]], dtype=np.uint64)

    def add(self, links: Hashes) -> None:
        """Take links, shape (links, 4): key and number of the larger end, then of the smaller one."""
        self._parts.add(links, self._range_of(links[:, 0]))

    def eliminate(self) -> Iterator[Hashes]:
        """Give the vertices that have a smaller one in their component, shape (vertices, 2), range by range."""
        for number in reversed(range(int(self._ranges.sum()))):
            kept = np.empty((0, 4), np.uint64)
            for links in self._parts.drain(number):
                kept = self._contract(np.concatenate([kept, links]), number)
            yield kept[:, :2]

    def _contract(self, links: Hashes, number: int) -> Hashes:
        """Links of the range's vertices to the smallest of their components; those of others are added to their own."""
        vertices, smallest = _components(links)
        ranges = self._range_of(vertices[:, 0])
        stars = np.concatenate([vertices, vertices[smallest]], axis=1)
        moves = smallest != np.arange(len(vertices))
        here = ranges == number
        level = int(np.searchsorted(self._bases, number, side="right")) - 1
        below = ~here & (vertices[:, 0] >> np.uint64(SPLIT_BIT) == level)
        self._parts.add(stars[moves & below], ranges[moves & below])
        return stars[moves & here]

    def _range_of(self, keys: Hashes) -> npt.NDArray[np.int64]:
        levels = (keys >> np.uint64(SPLIT_BIT)).astype(np.int64)
        fine = keys >> np.uint64(SPLIT_BIT - _FINE_BITS) & np.uint64((1 << _FINE_BITS) - 1)
        return (self._bases[levels] + (fine * self._ranges[levels] >> np.uint64(_FINE_BITS))).astype(np.int64)


def _components(links: Hashes) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """The vertices of links, ascending, shape (vertices, 2), and the place of the smallest of each one's component."""
    ends = links.reshape(-1, 2)
    order = np.lexsort((ends[:, 1], ends[:, 0]))
    ends = ends[order]
    new = np.concatenate([[True], (ends[1:] != ends[:-1]).any(axis=1)])
    places = np.empty(len(ends), np.int32)
    places[order] = np.cumsum(new, dtype=np.int32) - 1
    vertices = ends[new]
    first, second = places.reshape(-1, 2).T
    graph = coo_array((np.ones(len(links), np.int8), (first, second)), shape=(len(vertices), len(vertices)))
    number, components = connected_components(graph, directed=False)
    smallest = np.empty(number, np.int64)
    smallest[components[::-1]] = np.arange(len(vertices))[::-1]  # of equal ones the last written stays: the smallest
    return vertices, smallest[components]
