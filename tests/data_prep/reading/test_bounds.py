"""Small files that expand to large content: memory stays bounded while they are read."""

import tarfile
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from prep_fakes import options, record, text, write_jsonl

from data_prep import ledger
from data_prep.documents import Document, Problems
from data_prep.domains import MAX_LISTED, find_domains
from data_prep.prepare import prepare
from data_prep.reading.corpus import open_files
from data_prep.reading.fields import Fields
from megatron_ext.utils.errors import UserError

MIB = 1 << 20


def peak_of(path):
    """Return Python's peak memory in bytes while a file is read, and the number of documents."""
    tracemalloc.start()
    number = sum(1 for _ in open_files(path, Fields(default="Web")).documents(Problems("skip")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, number


def test_zstd_file_with_extreme_compression(tmp_path):
    content = zstandard.compress((b'{"text": "' + b"a" * MIB + b'"}\n') * 100)
    assert len(content) < 32 << 10
    (tmp_path / "a.jsonl.zst").write_bytes(content)
    peak, number = peak_of(tmp_path)
    assert (number, peak < 90 * MIB) == (100, True), peak


def test_tar_members_without_a_document(tmp_path):
    with (tmp_path / "a.tar").open("wb") as file:
        for number in range(8):
            info = tarfile.TarInfo(f"a.m{number}")
            info.size = 16 * MIB
            file.write(info.tobuf())
            file.seek(info.size, 1)  # a hole of zeros
        file.truncate(file.tell() + 1024)
    peak, number = peak_of(tmp_path)
    assert (number, peak < 24 * MIB) == (0, True), peak


def arrow_peak(folder):
    """Return Arrow's peak memory in bytes while a folder is read, and hashes of the texts."""
    before, most, texts = pyarrow.total_allocated_bytes(), 0, []
    for document in open_files(folder, Fields(default="Web")).documents(Problems("skip")):
        most = max(most, pyarrow.total_allocated_bytes() - before)
        texts.append(hash(document.text))
    return most, texts


def test_one_text_in_many_rows_of_a_table(tmp_path):
    """The file stores the text once, in a dictionary. A batch of rows contains few copies of it."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * MIB] * 100}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < MIB
    most, texts = arrow_peak(tmp_path)
    assert (texts, most < 50 * MIB) == ([hash("a" * MIB)] * 100, True), most


@pytest.mark.parametrize("column", ["domain", "meta"])
def test_one_domain_in_many_rows_of_a_table(tmp_path, column):
    value = {"redpajama_set_name": "d" * MIB} if column == "meta" else "d" * MIB
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 99, column: [value] * 99}), tmp_path / "a.parquet")
    before = pyarrow.total_allocated_bytes()
    problems, peaks = Problems("skip"), []
    list(open_files(tmp_path).documents(problems, lambda _: peaks.append(pyarrow.total_allocated_bytes() - before)))
    assert list(problems.counts.values()) == [99]
    assert max(peaks) < 50 * MIB


@pytest.mark.parametrize("dictionary", [True, False])
def test_different_texts_of_a_row_group_are_not_kept(tmp_path, dictionary):
    """Parquet drops a dictionary that grows too large, and stores the rest of the row group plainly."""
    texts = [f"{number:07} " * 16_000 for number in range(800)]
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=dictionary, write_batch_size=8)
    del table
    most, found = arrow_peak(tmp_path)
    assert (found == [hash(one) for one in texts], most < 50 * MIB) == (True, True), most


class ManyDomains:
    """Corpus with one domain per document. The test counts comparisons of domain names."""

    def documents(self, problems):
        return (Document(f"{number}", "x", f"site{number}", "a.jsonl") for number in range(20_000))


def test_many_domains_are_read_once_and_listed_in_part(monkeypatch):
    calls = []
    key = find_domains.__globals__["domain_key"]
    monkeypatch.setitem(find_domains.__globals__, "domain_key", lambda name: calls.append(name) or key(name))
    with pytest.raises(
        UserError, match=r"^--train-domains: unknown domain C4; choose from .*site\d+, \.\.\.$"
    ) as caught:
        find_domains(ManyDomains(), ["C4"], "--train-domains")
    assert caught.value.hint.count("site") == MAX_LISTED
    assert len(calls) < 20_010


def test_domains_beyond_some_are_counted_together(tmp_path, monkeypatch, tokenizer_file):
    monkeypatch.setattr(ledger, "MAX_UNUSED_DOMAINS", 5)
    rows = [record(f"D{number}", text(number)) for number in range(20)] + [record("C4", text("c"))]
    write_jsonl(tmp_path / "raw/a.jsonl", rows)
    given = {"train_domains": ["C4"], "test_domains": [], "validation_fraction": 0.0}
    manifest = prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **given))
    counted = {one.domain: one.documents for one in manifest.unused}
    assert counted == {**{f"D{number}": 1 for number in range(5)}, ledger.OTHER_DOMAINS: 15}
