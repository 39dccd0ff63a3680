"""Record of the files whose sha256 was verified, so that a resumed run only reads files that changed."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from pathlib import Path

from data_prep.manifest import ShardEntry
from megatron_ext.data.verify import check_here
from megatron_ext.utils.atomic_files import read_regular, write_atomically
from megatron_ext.utils.json_text import parse_json

FILE_NAME = "verified_shards.json"

FileStamp = list[str | int]
"""[sha256, size in bytes, inode, modification time, change time] of a file, times in ns.

The operating system sets the change time. Any write, replacement or change of another timestamp updates it.
"""


class ShardVerifier:
    """Verifier of the sha256 of files that changed since their last verification.

    A disk that silently returns other bytes than were written is not detected.

    Args:
        root: folder of the manifest.
        known: stamps of verified files, by absolute path.
        suspect: tar names, as in the manifest, of shards to read even if their files are in `known`. This is needed
            because a failing disk does not change timestamps.

    Attributes:
        root: folder of the manifest.
        stamps: stamps of the files that match the manifest, by absolute path.
    """

    def __init__(self, root: Path, known: Mapping[str, FileStamp], suspect: Container[str] = ()) -> None:
        self.root, self._known, self._suspect = root, known, suspect
        self.stamps: dict[str, FileStamp] = {}
        self._unchanged_paths: set[str] = set()

    @property
    def num_unchanged(self) -> int:
        """Number of files in `stamps` that were not read again."""
        return len(self._unchanged_paths)

    def check(self, shard: ShardEntry) -> None:
        """Check a shard and its index. Several threads may call this at once, each for a different shard.

        Raises:
            UserError: a file is missing, or has another size or other content. The message names the file.
        """
        stamps = self._stamps(shard)  # taken before reading, so that a concurrent write is detected next time
        is_trusted = len(stamps) == 2 and shard.file not in self._suspect
        is_unchanged = is_trusted and all(self._known.get(path) == stamp for path, stamp in stamps.items())
        check_here(self.root, "size" if is_unchanged else "sha256", shard)
        self.stamps.update(stamps)
        if is_unchanged:
            self._unchanged_paths.update(stamps)

    def _stamps(self, shard: ShardEntry) -> dict[str, FileStamp]:
        """Return the stamps of those files of the shard that exist."""
        stamps: dict[str, FileStamp] = {}
        for name, sha256 in ((shard.file, shard.sha256), (shard.index, shard.index_sha256)):
            path = (self.root / name).absolute()
            if path.exists():
                stat = path.stat()
                stamps[str(path)] = [sha256, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
        return stamps


def read_verified(folder: Path) -> dict[str, FileStamp]:
    """Read the stamps recorded in a run folder. Return an empty dictionary if there are none or they are unreadable."""
    try:
        known = parse_json(read_regular(folder / FILE_NAME))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def write_verified(folder: Path, stamps: Mapping[str, FileStamp]) -> None:
    """Record the stamps of verified files in a run folder.

    Raises:
        OSError: the record cannot be written.
    """
    write_atomically(folder / FILE_NAME, json.dumps(stamps).encode())
