"""Which files had their manifest's sha256 when a run began, so that one that goes on reads only those that changed."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path

from data_prep.manifest import ShardEntry
from megatron_ext.data.verify import check_here
from megatron_ext.files import read_regular, write_whole
from megatron_ext.json_text import parse_json

NAME = "verified_shards.json"

Stamp = list[str | int]
"""[sha256, bytes, inode, time of modification, time of change], times in ns. The last is the operating system's own:
it moves with whatever is written to a file, copied over it or done to its other times."""


class Verified:
    """Compares the sha256 of files that are not as they were when it was compared before.

    What it cannot see is a disk that gives other bytes than were written, without a word.

    Args:
        root: folder of the manifest.
        known: by absolute path, what was compared before.
        doubted: shards that are read whatever is known of them, by the name of their tar in the manifest: a disk that
            fails leaves a file's times as they were.

    Attributes:
        root: as given.
        found: by absolute path, the files that are what the manifest says.
    """

    def __init__(self, root: Path, known: Mapping[str, Stamp], doubted: Container[str] = ()) -> None:
        self.root, self._known, self._doubted = root, known, doubted
        self.found: dict[str, Stamp] = {}
        self._unchanged: set[str] = set()

    @property
    def unchanged(self) -> int:
        """How many of the files found were not read again."""
        return len(self._unchanged)

    def check(self, shard: ShardEntry) -> None:
        """Check a shard and its index; several threads may, each a shard of its own.

        Raises:
            UserError: a file is missing, of another size, or has other content; the file is named.
        """
        stamps = self._stamps(shard)  # before they are read: what is written meanwhile shows the next time
        trusted = len(stamps) == 2 and shard.file not in self._doubted
        same = trusted and all(self._known.get(path) == stamp for path, stamp in stamps.items())
        check_here(self.root, "size" if same else "sha256", shard)
        self.found.update(stamps)
        if same:
            self._unchanged.update(stamps)

    def _stamps(self, shard: ShardEntry) -> dict[str, Stamp]:
        """Of the shard's files that are there."""
        stamps: dict[str, Stamp] = {}
        for name, sha256 in ((shard.file, shard.sha256), (shard.index, shard.index_sha256)):
            path = (self.root / name).absolute()
            if path.exists():
                stat = path.stat()
                stamps[str(path)] = [sha256, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
        return stamps


def read_verified(folder: Path) -> dict[str, Stamp]:
    """What a run's folder says was compared; nothing where it says nothing that can be read."""
    try:
        known = parse_json(read_regular(folder / NAME))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_verified(folder: Path, found: Mapping[str, Stamp]) -> None:
    """Keep in a run's folder what was compared.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(folder / NAME, json.dumps(found).encode())
