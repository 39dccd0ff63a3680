from pathlib import Path

import prep_fakes
import pytest

from data_prep.tokenization.tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([prep_fakes.text(seed, 200) for seed in range(5)], 320).save(str(path))
    return path


@pytest.fixture
def records(tmp_path: Path) -> Path:
    folder = tmp_path / "raw"
    prep_fakes.write_jsonl(folder / "a.jsonl.zst", prep_fakes.lines(["C4", "CommonCrawl", "ArXiv"], 20))
    prep_fakes.write_jsonl(folder / "b.jsonl", prep_fakes.lines(["C4", "ArXiv", "Book"], 15, "more "))
    return folder
