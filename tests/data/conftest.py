"""Prepared data with several small shards per domain, and its streams read back by webdataset alone."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import webdataset

from data_prep.manifest import Manifest, load_manifest
from data_prep.prepare import PrepareOptions, prepare
from data_prep.tokenization.tokenizer import train_tokenizer
from megatron_ext.data.shards import TokenStore

SIZES = {"C4": 40, "CommonCrawl": 55, "ArXiv": 25}


def text(seed: str) -> str:
    generator = random.Random(seed)
    return " ".join("".join(generator.choices("abcdeé", k=4)) for _ in range(generator.randint(1, 50))) + seed


@pytest.fixture(scope="session")
def prepared(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    with (folder / "raw.jsonl").open("w") as file:
        for domain, size in SIZES.items():
            for number in range(size):
                meta = {"redpajama_set_name": f"RedPajama{domain}"}
                file.write(json.dumps({"text": text(f"{domain}{number}"), "meta": meta}) + "\n")
    train_tokenizer([text(str(seed)) for seed in range(20)], 300).save(str(folder / "tokenizer.json"))
    options = PrepareOptions(
        input=str(folder / "raw.jsonl"),
        output=str(folder / "prepared"),
        train_domains=["CommonCrawl", "C4"],
        test_domains=["ArXiv"],
        tokenizer=str(folder / "tokenizer.json"),
        validation_fraction=0.1,
        shard_tokens=600,
        progress=False,
    )
    prepare(options)
    return folder / "prepared"


@pytest.fixture(scope="session")
def manifest(prepared: Path) -> Manifest:
    return load_manifest(prepared)


@pytest.fixture
def store(prepared: Path, manifest: Manifest) -> TokenStore:
    return TokenStore(prepared, manifest, "train")


@pytest.fixture(scope="session")
def documents(prepared: Path) -> dict[str, list[np.ndarray]]:
    """Token arrays of every document by split, with domains in alphabetical order, read without the index files."""
    return {
        split: [
            sample["tokens.npy"].astype(np.int64)
            for file in sorted((prepared / split).rglob("*.tar"))
            for sample in webdataset.WebDataset(str(file), shardshuffle=False).decode()
        ]
        for split in ("train", "validation", "test")
    }
