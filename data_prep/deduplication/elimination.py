"""Find the vertices of a graph that have a smaller one in their component, in constant memory for any graph.

Vertices are eliminated from the largest to the smallest, range by range. When a vertex is eliminated, all its links
lead to smaller vertices. Without links, it is the smallest of its component. Otherwise the smallest neighbour takes
over its links to the other neighbours, so that connectivity is preserved. This is the node reduction of Dementiev,
Sanders, Schultes and Sibeyn 2004 ("Engineering an external memory minimum spanning tree algorithm", IFIP TCS), for
components. A whole range of vertices is eliminated at once by a search for components in memory.

Links are stored in the file of the range of their larger end, and are read from there in blocks. A block is reduced to
a tree for each of its components. A link for each vertex of the range is kept for the next block, and links between
smaller vertices are written to their files. The number of links therefore never grows. Each time a link is written, it
moves down by at least one range: for m links and R ranges, at most R m links are written. Because vertices are ordered
by hashes, far fewer are: 1 to 2.6 m for 100 ranges, measured for small groups, a chain and random pairs.

Levels: a link belongs to the level of its larger end. Vertices are judged by links of no higher level than their own. A
path from v to a smaller vertex, cut at the first smaller one, has only larger vertices in between. These are of v's
level if none is of a higher level. Links that an elimination leaves between lower levels are therefore useless and are
dropped: two vertices that are linked only through a vertex of a higher level stay separate.
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
"""Number of hash bits that determine the range."""


class Links:
    """Links between vertices. A vertex has a key and a number, and is ordered by key, then by number.

    Args:
        folder: folder for the links, created here.
        vertices: number of vertices of each level; the level is the part of a key from bit 62 on.
        block: approximate number of vertices per range, as keys are hashes; and number of links read at once.
    """

    def __init__(self, folder: Path, vertices: Sequence[int], block: int) -> None:
        self._parts = Partitions(folder, 4, block)
        self._ranges = np.array([1 + number // block for number in vertices], np.uint64)
        self._bases = np.cumsum([0, *self._ranges[:-1]], dtype=np.uint64)

    def add(self, links: Hashes) -> None:
        """Add links, shape (links, 4): key and number of the larger end, then of the smaller one."""
        self._parts.add(links, self._range_of(links[:, 0]))

    def eliminate(self) -> Iterator[Hashes]:
        """Yield the vertices that have a smaller one in their component, shape (vertices, 2), range by range."""
        for number in reversed(range(int(self._ranges.sum()))):
            kept = np.empty((0, 4), np.uint64)
            for links in self._parts.drain(number):
                kept = self._contract(np.concatenate([kept, links]), number)
            yield kept[:, :2]

    def _contract(self, links: Hashes, number: int) -> Hashes:
        """Return links from the range's vertices to the smallest of their components; store links of other ranges."""
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
    """Return the vertices of links, sorted, shape (vertices, 2), and for each the index of its component's smallest."""
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
    smallest[components[::-1]] = np.arange(len(vertices))[::-1]  # the last assignment wins: the smallest vertex
    return vertices, smallest[components]
