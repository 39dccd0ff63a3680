"""Prepared data of random tokens, to measure loading with: a folder as `selectron prepare` makes one."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.manifest import DomainEntry, Manifest, ShardEntry, TokenizerEntry, save_manifest

DOMAIN = "Random"
VOCABULARY = 2**16
"""Tokens that two bytes tell apart."""
MEAN_DOCUMENT = 1000
"""Tokens: about that of SlimPajama's documents, whose lengths are spread as widely."""
_FACTS = b"{" + b" " * 118 + b"}"
"""Stands beside each document, as long as what `selectron prepare` writes there."""


def make_random_data(
    root: Path, num_shards: int, shard_tokens: int, seed: int, vocabulary: int = VOCABULARY
) -> Manifest:
    """Write a folder of training data. All shards have the same content, in files of their own.

    Args:
        root: the folder, made if it is not there.
        num_shards: how many files.
        shard_tokens: tokens of each, uint16.
        seed: of the tokens and the documents' lengths, which are log-normal.
        vocabulary: tokens there are; more than 65,536 are not used.

    Returns:
        Its manifest.
    """
    tar, index = _shard(shard_tokens, min(vocabulary, VOCABULARY), np.random.default_rng(seed))
    folder = root / "train" / DOMAIN
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, index)
    digests = [hashlib.sha256(content).hexdigest() for content in (tar, buffer.getvalue())]
    shards = []
    for number in range(num_shards):
        files = [folder / f"{number:06d}{suffix}" for suffix in (".tar", ".index.npy")]
        for path, content in zip(files, (tar, buffer.getvalue()), strict=True):
            path.write_bytes(content)
        file, other = (path.relative_to(root).as_posix() for path in files)
        shards.append(ShardEntry(file, other, len(index), shard_tokens, len(tar), buffer.tell(), *digests))
    tokens, documents = num_shards * shard_tokens, num_shards * len(index)
    domain = DomainEntry("train", DOMAIN, documents, tokens, 4 * tokens, 4 * tokens, shards)
    manifest = Manifest(
        1, TokenizerEntry("tokenizer.json", "0" * 64, VOCABULARY, "<|endoftext|>", 0), "uint16", [domain]
    )
    save_manifest(root, manifest)
    return manifest


def _shard(tokens: int, vocabulary: int, generator: np.random.Generator) -> tuple[bytes, npt.NDArray[np.int64]]:
    """A tar of documents, and its index: int64 [documents, 2], byte offset and number of tokens."""
    rows: list[tuple[int, int]] = []
    left, stream = tokens, io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        while left:
            count = min(left, 1 + int(generator.lognormal(np.log(MEAN_DOCUMENT) - 0.5, 1.0)))
            array = io.BytesIO()
            np.save(array, generator.integers(0, vocabulary, count, dtype=np.uint16))
            for suffix, content in (("json", _FACTS), ("tokens.npy", array.getvalue())):
                member = tarfile.TarInfo(f"{len(rows):09d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            blocks = -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            rows.append((tar.offset - blocks + member.size - 2 * count, count))
            left -= count
    return stream.getvalue(), np.array(rows, dtype="<i8")
