"""Benchmark of data preparation: all contestants produce the same tokens, and the report follows from the numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import zstandard

from data_prep.tokenization.tokenizer import train_tokenizer
from megatron_ext.bench.prepare import run as prepare
from megatron_ext.bench.prepare.contestants import bare
from megatron_ext.bench.prepare.input import DOMAIN, TEST_DOMAIN, input_texts, random_texts, read_texts, write_input
from megatron_ext.bench.prepare.report import PrepareReport, PrepareRow
from megatron_ext.bench.supervise import measure_command
from megatron_ext.cli import main


def test_input_files_contain_all_texts(tmp_path: Path) -> None:
    texts = ["one", "two\n", "three é", "two\n"]
    given = write_input(tmp_path, iter(texts), 3)
    assert (given.documents, given.bytes) == (4, sum(len(text.encode()) for text in texts))
    assert sorted(read_texts(sorted(given.folder.iterdir()))) == sorted(texts)
    assert list(input_texts(given.lines)) == texts
    assert len(list(given.folder.iterdir())) == 3
    first = zstandard.ZstdDecompressor().decompressobj().decompress((given.folder / "000.jsonl.zst").read_bytes())
    assert json.loads(first)["text"] == "three é"


def test_every_20th_document_is_test_text(tmp_path: Path) -> None:
    given = write_input(tmp_path, map(str, range(50)), 2)
    domains = [json.loads(line)["domain"] for line in given.lines.read_text().splitlines()]
    assert [place for place, domain in enumerate(domains) if domain == TEST_DOMAIN] == [0, 20, 40]
    assert set(domains) == {TEST_DOMAIN, DOMAIN}


def test_random_text_size() -> None:
    texts = list(random_texts(50_000, seed=1))
    assert 50_000 <= sum(map(len, texts)) < 50_000 + 2000 * 11
    assert texts == list(random_texts(50_000, seed=1)) != list(random_texts(50_000, seed=2))


def test_cost_includes_descendants() -> None:
    """A grandchild that outlives its parent uses CPU time and memory."""
    work = "import time; x = b'1' * (300 << 20); end = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {work!r}], start_new_session=True)"
    cost, _ = measure_command([sys.executable, "-c", parent], {})
    assert cost.cpu_seconds >= 0.3
    assert cost.peak_bytes > 300 << 20
    with pytest.raises(RuntimeError, match="no such thing"):
        measure_command([sys.executable, "-c", "raise SystemExit('no such thing')"], {})


def test_the_report_by_hand(tmp_path: Path) -> None:
    floors = [
        PrepareRow(name, 10, 2_000_000, 500_000, 2.0, spent, 0.0, 0) for name, spent in (("slow", 2.0), ("fast", 1.0))
    ]
    ours = PrepareRow("ours", 10, 2_000_000, 500_010, 4.0, 3.25, 2.0, 300 << 20, "cleans")
    report = PrepareReport(
        data="Text",
        machine={"torch": "2"},
        workers=2,
        rounds=3,
        rows=[*floors, ours],
        left_out=["other (not there)"],
    )
    report.write(tmp_path)
    text = (tmp_path / "prepare.md").read_text()
    assert "Text: 10 documents, 2.0 MB of text. 2 workers of one thread; medians of 3 rounds" in text
    assert "| ours | 500,010 | 4.0 | 3.2 | 2.0 | 1.60 | 400 | 160 % | 80 % | 300 |" in text
    assert "\nours: cleans.\nNot measured: other (not there).\n" in text
    assert json.loads((tmp_path / "prepare.json").read_text())["rows"][2]["start_cpu_seconds"] == 2.0


def test_bare_tokenizer_divides_texts_among_workers(tmp_path: Path) -> None:
    tokenizer, texts = tmp_path / "tokenizer.json", list(random_texts(20_000, seed=2))
    trained = train_tokenizer(texts, 400)
    trained.save(str(tokenizer))
    given = write_input(tmp_path / "given", iter(texts), 3)
    found = bare(str(tokenizer), str(given.folder), 2, "encode_batch")
    assert found["tokens"] == sum(len(trained.encode(text, add_special_tokens=False).ids) for text in texts)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one floor and one worker, because every further run starts processes that import everything again."""
    monkeypatch.setattr(prepare, "FLOORS", prepare.FLOORS[1:])
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(random_texts(20_000, seed=2), 400).save(str(tokenizer))
    options = ["--tokenizer", str(tokenizer), "--megabytes", "0.05", "--rounds", "1", "--workers", "1"]
    assert main(["bench", "prepare", *options, "--output", str(tmp_path / "out")]) == 0
    raw = json.loads((tmp_path / "out" / "prepare.json").read_text())
    names = [*prepare.FLOORS, prepare.OURS, prepare.OURS_DEFAULT, prepare.DATATROVE]
    assert [row["name"] for row in raw["rows"]] == names
    floor, ours, usual, theirs = (row["tokens"] for row in raw["rows"])
    assert ours == usual == theirs == floor + raw["rows"][0]["documents"]
    assert [bool(row["does_more"]) for row in raw["rows"]] == [name == prepare.OURS_DEFAULT for name in names]
    assert raw["left_out"] == ["Megatron-LM preprocess_data (no `--megatron-lm`)"]
    assert capsys.readouterr().out == (tmp_path / "out" / "prepare.md").read_text() + "\n"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"prepare.json", "prepare.md"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--workers", "0"], "--workers: 0 is less than 1; give 1 or more"),
        (["--megabytes", "0"], "--megabytes: 0.0 is not above 0; give a positive number"),
        (
            ["--megatron-lm", "nowhere"],
            "--megatron-lm: nowhere has no tools/preprocess_data.py; give a checkout",
        ),
    ],
)
def test_invalid_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prepare", "--tokenizer", "none", *options]) == 2
    assert message in capsys.readouterr().err
