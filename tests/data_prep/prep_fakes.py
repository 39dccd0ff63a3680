"""Small generated raw corpora."""

import json
import random
from pathlib import Path

import zstandard

from data_prep.prepare import PrepareOptions
from data_prep.running.execution import Execution
from data_prep.stages import Filtering

UNFILTERED = Filtering(cleaning=None, duplicates="keep", overlap=None)
"""No cleaning, deduplication or decontamination, so that a preparation has a single stage."""

SIGNS = ["naïve", "東京", "λ→μ", "token,", "window.", "chunk\n", "{key}:", "3.14", "<b>", "'x'", "\t"]
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "mixer", "end", *SIGNS]


def text(seed: object, words: int = 40) -> str:
    generator = random.Random(str(seed))
    return " ".join(generator.choice(WORDS) for _ in range(words)) + f" [{seed}]"


def record(domain: str, content: str) -> str:
    return json.dumps({"text": content, "meta": {"redpajama_set_name": f"RedPajama{domain}"}}, ensure_ascii=False)


def lines(domains: list[str], documents: int, tag: str = "") -> list[str]:
    """Return interleaved records of several domains, all with different texts."""
    return [record(domain, text(f"{tag}{domain}{i}", 5 + i % 60)) for i in range(documents) for domain in domains]


def write_jsonl(path: Path, content: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(line + "\n" for line in content).encode()
    path.write_bytes(zstandard.compress(data) if path.suffix == ".zst" else data)
    return path


def options(source: Path, output: Path, tokenizer_path: Path | str, **changes: object) -> PrepareOptions:
    fields: dict = {
        "input": str(source),
        "output": str(output),
        "train_domains": ["C4", "CommonCrawl"],
        "test_domains": ["ArXiv"],
        "tokenizer": str(tokenizer_path),
        "validation_fraction": 0.2,
        "shard_tokens": 700,
        "progress": False,
    }
    if "workers" in changes:
        fields["execution"] = Execution(workers=changes.pop("workers"))
    return PrepareOptions(**{**fields, **changes})
