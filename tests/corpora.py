"""Small prepared corpus for tests that read prepared data."""

from __future__ import annotations

import json
import random
from pathlib import Path

from data_prep.prepare import PrepareOptions, prepare


def prepared(
    folder: Path,
    *,
    documents: int = 180,
    words: tuple[int, int] = (10, 80),
    test_folder: bool = False,
    tokenizer: str = "train",
) -> Path:
    """Prepare a data folder in `folder`: two training domains, one test domain, and a trained or given tokenizer.

    `documents` is the number of documents in all three domains together. Each has between the first and the second
    number of `words`. With `test_folder`, every fifth document and the whole test domain are in a folder for the test.
    """
    vocabulary = [f"{a}{b}" for a in ("ka", "lo", "mi", "nu", "pe") for b in ("ra", "sto", "tin", "vel")]
    dice = random.Random(1)
    raw = folder / "raw.jsonl"
    for number in range(documents):
        text = " ".join(dice.choices(vocabulary, k=dice.randint(*words)))
        domain = ("First", "Second", "Other")[number % 3]
        if test_folder:
            raw = folder / "raw" / ("test" if domain == "Other" or number % 5 == 0 else "train") / "x.jsonl"
            raw.parent.mkdir(parents=True, exist_ok=True)
        with raw.open("a") as file:
            file.write(json.dumps({"text": f"{text} {number}", "meta": {"redpajama_set_name": domain}}) + "\n")
    prepare(
        PrepareOptions(
            input=str(folder / ("raw" if test_folder else "raw.jsonl")),
            output=str(folder / "data"),
            train_domains=["First", "Second"],
            test_domains=["Other"],
            tokenizer=tokenizer,
            vocab_size=300,
            validation_fraction=0.2,
            shard_tokens=1500,
            progress=False,
        )
    )
    return folder / "data"
