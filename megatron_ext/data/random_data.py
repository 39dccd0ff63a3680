"""Prepared data of random tokens for benchmarks of data loading, in the format of `selectron prepare`."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.manifest import DomainEntry, Manifest, ShardEntry, TokenizerEntry, save_manifest

DOMAIN = "Random"
VOCAB_SIZE = 2**16
"""Number of tokens that two bytes can represent."""
MEAN_DOCUMENT_TOKENS = 1000
"""Mean tokens per document, about that of SlimPajama, with a similarly wide distribution of lengths."""
_METADATA = b"{" + b" " * 118 + b"}"
"""Placeholder for a document's metadata, of the same size as that of `selectron prepare`."""


def make_random_data(
    root: Path, num_shards: int, shard_tokens: int, seed: int, vocab_size: int = VOCAB_SIZE
) -> Manifest:
    """Write a folder of training data. All shards are separate files with the same content.

    Args:
        root: the folder. It is created if it is missing.
        num_shards: number of shards.
        shard_tokens: tokens per shard, uint16.
        seed: seed of the tokens and of the document lengths, which are log-normal.
        vocab_size: number of distinct tokens, capped at 65,536.

    Returns:
        The manifest.
    """
    tar, index = _shard(shard_tokens, min(vocab_size, VOCAB_SIZE), np.random.default_rng(seed))
    folder = root / "train" / DOMAIN
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.save(buffer, index)
    digests = [hashlib.sha256(content).hexdigest() for content in (tar, buffer.getvalue())]
    shards = []
    for shard in range(num_shards):
        files = [folder / f"{shard:06d}{suffix}" for suffix in (".tar", ".index.npy")]
        for path, content in zip(files, (tar, buffer.getvalue()), strict=True):
            path.write_bytes(content)
        file, index_file = (path.relative_to(root).as_posix() for path in files)
        shards.append(ShardEntry(file, index_file, len(index), shard_tokens, len(tar), buffer.tell(), *digests))
    tokens, documents = num_shards * shard_tokens, num_shards * len(index)
    domain = DomainEntry("train", DOMAIN, documents, tokens, 4 * tokens, 4 * tokens, shards)
    manifest = Manifest(
        1, TokenizerEntry("tokenizer.json", "0" * 64, VOCAB_SIZE, "<|endoftext|>", 0), "uint16", [domain]
    )
    save_manifest(root, manifest)
    return manifest


def _shard(tokens: int, vocab_size: int, generator: np.random.Generator) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Return a tar of documents, and its index: int64 [documents, 2], byte offset and number of tokens."""
    rows: list[tuple[int, int]] = []
    remaining, stream = tokens, io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        while remaining:
            count = min(remaining, 1 + int(generator.lognormal(np.log(MEAN_DOCUMENT_TOKENS) - 0.5, 1.0)))
            array = io.BytesIO()
            np.save(array, generator.integers(0, vocab_size, count, dtype=np.uint16))
            for suffix, content in (("json", _METADATA), ("tokens.npy", array.getvalue())):
                member = tarfile.TarInfo(f"{len(rows):09d}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
            blocks = -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            rows.append((tar.offset - blocks + member.size - 2 * count, count))
            remaining -= count
    return stream.getvalue(), np.array(rows, dtype="<i8")
