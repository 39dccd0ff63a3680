"""Search for all vertices of a graph except the smallest of each component, in constant memory.

Vertices are eliminated from the largest to the smallest, range by range. When a vertex is eliminated, all its links
lead to smaller vertices. A vertex without links is the smallest of its component. Otherwise, the links to its other
neighbours are moved to its smallest neighbour, so that connectivity is preserved. This is the node reduction of
Dementiev, Sanders, Schultes and Sibeyn 2004 ("Engineering an external memory minimum spanning tree algorithm", IFIP
TCS), for connected components. A whole range of vertices is eliminated at once by a search for components in memory.

A link is stored in the file of the range that contains its larger end. A range's file is read in blocks. Each block is
reduced to one tree per component. One link for each vertex of the range is kept for the next block, and links between
smaller vertices are written to the files of lower ranges. The number of links therefore never grows. A link that is
written again moves down by at least one range, so that at most R m links are written for m links and R ranges. Because
vertices are ordered by hashes, far fewer links are written: 1 to 2.6 m for 100 ranges, measured for small groups, a
chain and random pairs.

Each vertex has a level, which is the most significant part of its key. For a vertex v, only paths count that contain no
vertex of a higher level than v. A path from v to the first smaller vertex has only larger vertices in between. If none
of these has a higher level than v, all have v's level. A link between two lower levels that results from the
elimination of v is therefore not needed, and is dropped. Two vertices that are linked only through a vertex of a higher
level stay separate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data_prep.contamination.ngrams import Hashes
from data_prep.deduplication.keys import HASH_BITS
from data_prep.deduplication.partitions import Partitions

_PREFIX_BITS = 30
"""Number of leading hash bits of a key that determine the vertex's range."""


class Links:
    """Links between vertices. A vertex is a document's (key, index), and vertices are ordered as these pairs.

    Args:
        folder: folder for the links, created here.
        vertices: number of vertices of each level. The level of a vertex is the split in its key (`HASH_BITS`).
        block: number of links read at once, and approximate number of vertices per range. The number of vertices is
            approximate because ranges are chosen by hash.
    """

    def __init__(self, folder: Path, vertices: Sequence[int], block: int) -> None:
        self._partitions = Partitions(folder, 4, block)
        self._ranges = np.array([1 + index // block for index in vertices], np.uint64)
        self._bases = np.cumsum([0, *self._ranges[:-1]], dtype=np.uint64)

    def add(self, links: Hashes) -> None:
        """Add links, shape (links, 4): key and index of the larger vertex, then key and index of the smaller vertex."""
        self._partitions.add(links, self._range_of(links[:, 0]))

    def eliminate(self) -> Iterator[Hashes]:
        """Yield (key, index) of the vertices that are not the smallest of their component, range by range.

        Each array has the shape (vertices, 2).
        """
        for index in reversed(range(int(self._ranges.sum()))):
            reduced = np.empty((0, 4), np.uint64)
            for links in self._partitions.drain(index):
                reduced = self._contract(np.concatenate([reduced, links]), index)
            yield reduced[:, :2]

    def _contract(self, links: Hashes, index: int) -> Hashes:
        """Reduce links to one per vertex.

        Args:
            links: links whose larger vertex is in the range, shape (links, 4).
            index: index of the range.

        Returns:
            A link from each vertex of the range to the smallest vertex of its component, except from that vertex
            itself. Links between vertices of lower ranges are stored if the larger vertex has the level of the range,
            and dropped otherwise.
        """
        vertices, smallest = _components(links)
        ranges = self._range_of(vertices[:, 0])
        star_links = np.concatenate([vertices, vertices[smallest]], axis=1)
        has_smaller = smallest != np.arange(len(vertices))
        in_range = ranges == index
        level = int(np.searchsorted(self._bases, index, side="right")) - 1
        below = ~in_range & (vertices[:, 0] >> np.uint64(HASH_BITS) == level)
        self._partitions.add(star_links[has_smaller & below], ranges[has_smaller & below])
        return star_links[has_smaller & in_range]

    def _range_of(self, keys: Hashes) -> npt.NDArray[np.int64]:
        levels = (keys >> np.uint64(HASH_BITS)).astype(np.int64)
        hash_prefix = keys >> np.uint64(HASH_BITS - _PREFIX_BITS) & np.uint64((1 << _PREFIX_BITS) - 1)
        return (self._bases[levels] + (hash_prefix * self._ranges[levels] >> np.uint64(_PREFIX_BITS))).astype(np.int64)


def _components(links: Hashes) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Return the sorted vertices of links, shape (vertices, 2), and the position of each component's smallest vertex.

    The second array has the shape (vertices,): for each vertex, the row of the smallest vertex in its component.
    """
    endpoints = links.reshape(-1, 2)
    order = np.lexsort((endpoints[:, 1], endpoints[:, 0]))
    endpoints = endpoints[order]
    is_new = np.concatenate([[True], (endpoints[1:] != endpoints[:-1]).any(axis=1)])
    positions = np.empty(len(endpoints), np.int32)
    positions[order] = np.cumsum(is_new, dtype=np.int32) - 1
    vertices = endpoints[is_new]
    first, second = positions.reshape(-1, 2).T
    graph = coo_array((np.ones(len(links), np.int8), (first, second)), shape=(len(vertices), len(vertices)))
    count, components = connected_components(graph, directed=False)
    smallest = np.empty(count, np.int64)
    smallest[components[::-1]] = np.arange(len(vertices))[::-1]  # the last assignment wins: the smallest vertex
    return vertices, smallest[components]
