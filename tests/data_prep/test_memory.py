"""Memory of a worker is independent of its input: peaks of a process after a small input and, later, after a large one.

The larger input is ten times the smaller one. Records are random letters, so that they barely compress.
"""

import io
import json
import random
import string
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from megatron_ext.utils.errors import UserError

PEAK = """
from pathlib import Path
def print_peak(*found):
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(line.split()[1] for line in lines if line.startswith("VmHWM")), *found)
"""
READ = f"""{PEAK}
import sys
from data_prep.documents import Problems
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
for folder in sys.argv[1:]:
    problems = Problems("skip")
    corpus = open_files(folder, Fields(default="Text"))
    letters = sum(len(document.text) for document in corpus.documents(problems))
    print_peak(letters, dict(problems.counts))
assert "torch" not in sys.modules
"""
CHOOSE = f"""{PEAK}
import sys
from data_prep.deduplication.survivors import ChooseSurvivors
for folder in sys.argv[1:]:
    step = ChooseSurvivors(*(f"{{folder}}/{{name}}" for name in ("pairs", "keys", "removed")), 1, block=10_000)
    step.run()
    print_peak(int(step.stats.stats["removed"].total))
"""
PREPARE = f"""{PEAK}
import sys
from megatron_ext.cli import main
tokenizer, *folders = sys.argv[1:]
options = ["--train-domains", "Text", "--domain", "Text", "--workers", "1", "--tasks", "1", "--tokenizer", tokenizer]
for folder in folders:
    code = main(["prepare", "--input", folder, "--output", folder + ".out", *options])
    print_peak("exit", code)
assert "torch" not in sys.modules
"""
MEBIBYTE = 1 << 20
FIELDS = Fields(default="Text")
pytestmark = pytest.mark.slow


def texts(number: int) -> list[str]:
    generator = random.Random(0)
    return [generator.randbytes(10_000).hex() for _ in range(number)]


def write_records(folder: Path, number: int) -> None:
    write_lines(folder, texts(number))


def write_words(folder: Path, number: int) -> None:
    """Write records of 20,000 letters that consist of known words, whose tokens the tokenizer's cache holds."""
    generator = random.Random(0)
    words = ["".join(generator.choices(string.ascii_lowercase, k=9)) for _ in range(1000)]
    write_lines(folder, [" ".join(generator.choices(words, k=2000)) for _ in range(number)])


def write_lines(folder: Path, content: list[str]) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in content)
    (folder / "x.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))


def write_table(folder: Path, number: int) -> None:
    """Write a table with one row group."""
    table = pyarrow.table({"text": texts(number)})
    pyarrow.parquet.write_table(table, folder / "x.parquet", row_group_size=number, use_dictionary=False)


def write_tar(folder: Path, number: int) -> None:
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name, text in enumerate(texts(number)):
            info = tarfile.TarInfo(f"{name}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))


def write_chain(folder: Path, number: int) -> None:
    """Write training documents connected in a chain, in random order, as pairs with one signature each."""
    generator = np.random.default_rng(0)
    chain = generator.permutation(number)
    pairs = np.stack([chain[:-1], chain[1:]], axis=1)[generator.permutation(number - 1)]
    rows = np.insert(pairs, [0, 1], 0, axis=1).astype("<u4")
    for name, content in (("pairs/00000_00.dups", rows), ("keys/00000.keys", _train_keys(number, generator))):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(content.tobytes())


def _train_keys(number: int, generator: np.random.Generator) -> np.ndarray:
    return generator.integers(2 << 62, 3 << 62, number, np.uint64)


def peaks(code: str, *arguments: Path) -> list[tuple[int, str]]:
    """Run a program. Return peak in bytes and text of each line that it printed by `print_peak`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [line.split(maxsplit=1) for line in output.splitlines() if line[:1].isdigit()]
    return [(1024 * int(kibibytes), rest) for kibibytes, rest in lines]


def write_inputs(tmp_path: Path, write: Callable[[Path, int], None], numbers: tuple[int, int]) -> list[Path]:
    """Write an input for each number of records or documents. Return the folders."""
    folders = [tmp_path / str(number) for number in numbers]
    for folder, number in zip(folders, numbers, strict=True):
        folder.mkdir()
        write(folder, number)
    return folders


@pytest.mark.parametrize(
    ("write", "small", "growth"),
    [(write_records, 200, 16 * MEBIBYTE), (write_table, 800, 120 * MEBIBYTE), (write_tar, 200, 16 * MEBIBYTE)],
)
def test_memory_of_reading_is_constant(tmp_path, write, small, growth):
    """4 and 40 MB, or tables of 16 and 160 MB, because Arrow's pool only fills after about 10 batches of 8 MB."""
    (first, few), (second, many) = peaks(READ, *write_inputs(tmp_path, write, (small, 10 * small)))
    assert (few.split()[0], many.split()[0]) == (str(small * 20_000), str(10 * small * 20_000))
    assert second < first + growth, (first, second)


def test_memory_of_a_preparation_is_constant(tmp_path, tokenizer_file):
    """0.6 and 6 MB: one batch and twelve."""
    (first, few), (second, many) = peaks(PREPARE, tokenizer_file, *write_inputs(tmp_path, write_words, (30, 300)))
    assert few == many == "exit 0"
    assert second < first + 160 * MEBIBYTE, (first, second)


def test_memory_of_choosing_survivors_is_constant(tmp_path):
    """40,000 and 400,000 documents, with 10,000 rows at a time. 130 bytes per document would add 45 MiB."""
    (first, few), (second, many) = peaks(CHOOSE, *write_inputs(tmp_path, write_chain, (40_000, 400_000)))
    assert (few, many) == ("39999", "399999")
    assert second < first + 12 * MEBIBYTE, (first, second)


def test_line_of_200_megabytes_is_not_kept_in_memory(tmp_path):
    with (tmp_path / "x.jsonl").open("w") as file:
        file.write('{"text": "before"}\n{"text": "')
        for _ in range(200):
            file.write("a b " * (MEBIBYTE // 4))
        file.write('"}\n{"text": "after"}\n')
    ((large, output),) = peaks(READ, tmp_path / "x.jsonl")
    assert output.startswith("11 {")  # "before" and "after" are read
    assert "'too long'): 1" in output
    assert large < 600 * MEBIBYTE  # half of it is used by imports


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst", ".tar", ".txt", ".parquet"])
def test_text_too_long(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("data_prep.documents.MAX_TEXT_LENGTH", 1000)
    path, good, bad = tmp_path / f"x{suffix}", "x" * 1000, "y" * 1001
    lines = "".join(json.dumps({"text": text}) + "\n" for text in (good, bad)).encode()
    if suffix == ".tar":
        with tarfile.open(path, "w") as tar:
            for text in (good, bad):
                info = tarfile.TarInfo(f"{text[0]}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text.encode()))
    elif suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [good, bad]}), path)
    elif suffix == ".txt":
        (tmp_path / "a.txt").write_text(good)
        path.write_text(bad)
    else:
        path.write_bytes(zstandard.compress(lines) if suffix.endswith("zst") else lines)
    problems = Problems("skip")
    assert [document.text for document in open_files(tmp_path, FIELDS).documents(problems)] == [good]
    assert [reason for _, reason in problems.counts] == ["too long"]
    with pytest.raises(UserError, match=r"too long \(.*1,001 characters, at most 1,000 are supported\)"):
        list(open_files(tmp_path, FIELDS).documents(Problems("stop")))


def test_line_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.reading.records.MAX_RECORD_BYTES", 100)
    monkeypatch.setattr("data_prep.reading.lines.MAX_RECORD_BYTES", 100)
    monkeypatch.setattr("data_prep.reading.lines.BLOCK_BYTES", 7)
    rows = ["x" * 10, "y" * 89, "z" * 88, "", "w" * 5000, "v"]  # each line has 12 more characters
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows[:3] + rows[4:]))
    problems = Problems("skip")
    found = [(document.id, document.text) for document in open_files(tmp_path, FIELDS).documents(problems)]
    assert found == [("x.jsonl:1", rows[0]), ("x.jsonl:3", rows[2]), ("x.jsonl:5", "v")]
    assert sum(problems.counts.values()) == 2
