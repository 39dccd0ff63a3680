"""Documents of Megatron's token files, and their export."""

import io
import multiprocessing
import os
import re
import signal
import struct
import tarfile

import fsspec
import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from pool import start_process
from prep_fakes import UNFILTERED, options
from read_documents import read, read_remote_pair
from tokenizers import Tokenizer

from data_prep.prepare import prepare
from data_prep.reading.indexed import export
from data_prep.tokenization.vocabularies import open_tokenizer
from megatron_ext.utils.errors import UserError


def test_token_files_are_decoded(tokens, tokenizer_file):
    documents, _, (bytes_reported, total) = read(tokens, tokenizer=open_tokenizer(str(tokenizer_file)))
    assert [(item.text, item.domain) for item in documents] == [
        ("first half, second half 東京", "Law"),
        ("another", "Law"),
    ]
    assert bytes_reported == total
    with pytest.raises(UserError, match=r"^--source-tokenizer: is not given, but .* contains tokens; "):
        read(tokens)


def test_token_files_at_a_url(tokens, tokenizer_file, tmp_path, monkeypatch):
    """Files at a URL are copied to temporary files, which are removed after reading."""
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    (tmp_path / "copies").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "copies"))
    for name in ("Law_text_document.bin", "Law_text_document.idx"):
        fsspec.filesystem("memory").put_file(str(tokens / name), f"/{tmp_path.name}/{name}")
    source = f"memory://{tmp_path.name}"
    documents, _, (bytes_reported, total) = read(source, **given)
    assert [(item.text, item.domain) for item in documents] == [
        ("first half, second half 東京", "Law"),
        ("another", "Law"),
    ]
    assert (bytes_reported, list((tmp_path / "copies").iterdir())) == (total, [])
    fsspec.filesystem("memory").rm_file(f"/{tmp_path.name}/Law_text_document.bin")
    with pytest.raises(UserError, match=r"^memory://.*/Law_text_document\.idx: has no \.bin beside it; "):
        read(source, **given)


def test_copy_of_a_remote_pair_is_removed(tokens, tokenizer_file, tmp_path):
    for suffix in ("bin", "idx"):
        (tmp_path / f"Law_text_document.{suffix}").rename(tmp_path / f"Law.{suffix}")
    copies = tmp_path / "copies"
    copies.mkdir()

    def copies_before_and_after(number, pauses):
        """Start a process, end it by a signal where it pauses, and list its copies before and after the signal."""
        ours, theirs = multiprocessing.Pipe()
        process = start_process(read_remote_pair, theirs, tmp_path, tokenizer_file, copies, pauses)
        theirs.close()
        assert ours.recv() == "paused"
        before = [path.name for path in copies.glob("selectron-*")]
        os.kill(process.pid, number)
        process.join()
        return before, [path.name for path in copies.glob("selectron-*")]

    for pauses in ("copying", "reading"):
        first, after_kill = copies_before_and_after(signal.SIGKILL, pauses)
        assert (len(first), after_kill) == (1, first)
        second, after_term = copies_before_and_after(signal.SIGTERM, pauses)
        assert (len(second), after_term) == (1, [])
        assert second != first  # the leftovers of the killed process were removed


def test_bin_longer_than_the_index(tokens, tokenizer_file):
    index, given = str(tokens / "Law_text_document.idx"), {"tokenizer": open_tokenizer(str(tokenizer_file))}
    with (tokens / "Law_text_document.bin").open("ab") as binary:
        size = binary.tell()
        binary.write(b"\1\0")
    message = rf"the last document ends at byte {size}, but the \.bin has {size + 2}"
    with pytest.raises(UserError, match=rf":3: does not fit its .bin \({message}\); repair it or "):
        read(tokens, **given)
    documents, problems, _ = read(tokens, "skip", **given)
    assert (len(documents), problems.counts) == (2, {(index, "does not fit its .bin"): 1})


def test_malformed_token_files(tokens, tokenizer_file, tmp_path):
    tokenizer = open_tokenizer(str(tokenizer_file))
    tokenizer.vocab_size = 5
    _, problems, _ = read(tokens, "skip", tokenizer=tokenizer)
    index = str(tmp_path / "Law_text_document.idx")
    assert problems.counts == {(index, "not the tokens of --source-tokenizer"): 2}
    (tmp_path / "Law_text_document.bin").unlink()
    with pytest.raises(UserError, match=rf"^{re.escape(index)}: has no .bin beside it; "):
        read(tokens, tokenizer=open_tokenizer(str(tokenizer_file)))


# Offsets in the index of `tokens`: a header of 34 bytes, lengths of three sequences (int32), their positions and the
# document bounds (int64).
LENGTHS, STARTS, BOUNDS = 34, 34 + 12, 34 + 12 + 24


@pytest.mark.parametrize(
    ("at", "number", "message"),
    [
        (LENGTHS + 4, -1, r"sequence 1 has -1 tokens starting at byte \d+, but the previous one ends at \d+"),
        (LENGTHS + 8, 3000, r"a document has the bytes \d+ to \d+, but the \.bin has \d+"),
        (STARTS, 2, "sequence 0 has \\d+ tokens starting at byte 2, but the previous one ends at 0"),
        (
            STARTS + 16,
            2**40,
            r"sequence 2 has \d+ tokens starting at byte 1099511627776, but the previous one ends at \d+",
        ),
        (BOUNDS, 1, "the first document starts at sequence 1, not 0"),
        (BOUNDS + 8, -2, "a document has the sequences 0 to -2, but there are 3"),
        (BOUNDS + 8, 4, "a document has the sequences 0 to 4, but there are 3"),
    ],
)
def test_inconsistent_index(tokens, tokenizer_file, at, number, message):
    """Documents before the contradiction are kept. Megatron's own reader returns bytes of other documents, or fails."""
    index = tokens / "Law_text_document.idx"
    content = bytearray(index.read_bytes())
    struct.pack_into("<i" if at < STARTS else "<q", content, at, number)
    index.write_bytes(content)
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(index))}:\d: does not fit its .bin \({message}\); repair it or "
    ):
        read(tokens, **given)
    documents, problems, _ = read(tokens, "skip", **given)
    assert problems.counts == {(str(index), "does not fit its .bin"): 1}
    assert [item.text for item in documents] == ["first half, second half 東京"][: len(documents)]
    assert len(documents) == (at in (LENGTHS + 8, STARTS + 16))


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # as Megatron's own dataset
def test_token_files_cut_off(tokens, tokenizer_file):
    binary, index = tokens / "Law_text_document.bin", tokens / "Law_text_document.idx"
    given = {"tokenizer": open_tokenizer(str(tokenizer_file))}
    binary.write_bytes(binary.read_bytes()[:-1])
    documents, problems, _ = read(tokens, "skip", **given)
    assert [item.text for item in documents] == ["first half, second half 東京"]
    assert problems.counts == {(str(index), "does not fit its .bin"): 1}
    binary.write_bytes(b"")
    with pytest.raises(UserError, match=r"\.idx: has an empty \.bin beside it; repair it or pass"):
        read(tokens, **given)
    binary.write_bytes(b"12")
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"\.idx: not an index of Megatron's \(buffer is smaller than .*\); repair it"):
        read(tokens, **given)


def test_a_document_of_too_many_tokens(tokens, tokenizer_file, monkeypatch):
    monkeypatch.setattr("data_prep.documents.MAX_TEXT_LENGTH", 8)
    documents, problems, _ = read(tokens, "skip", tokenizer=open_tokenizer(str(tokenizer_file)))
    assert [item.text for item in documents] == ["another"]
    assert {reason for _, reason in problems.counts} == {"too long"}


def test_megatron_reads_the_export(records, tmp_path, tokenizer_file):
    manifest = prepare(options(records, tmp_path / "out", tokenizer_file, tasks=2, filtering=UNFILTERED))
    prefixes = export(tmp_path / "out", manifest, tmp_path / "megatron/mine")
    assert [path.name for path in prefixes] == [
        f"mine_{entry.split}_{entry.domain}_text_document" for entry in manifest.domains
    ]
    library = Tokenizer.from_file(str(tokenizer_file))
    for prefix, entry in zip(prefixes, manifest.domains, strict=True):
        dataset = IndexedDataset(str(prefix))
        assert dataset.index.dtype == np.uint16
        assert dataset.document_indices.tolist() == list(range(entry.documents + 1))
        arrays = []
        for shard in entry.shards:
            with tarfile.open(tmp_path / "out" / shard.file) as tar:
                arrays += [np.load(io.BytesIO(tar.extractfile(m).read())) for m in tar if m.name.endswith(".npy")]
        assert [item.tolist() for item in dataset] == [item.tolist() for item in arrays]
        assert {int(item[-1]) for item in dataset} == {manifest.tokenizer.eos_id}
        assert sum(len(library.decode(item[:-1].tolist())) for item in dataset) == entry.characters
    with pytest.raises(UserError, match=r"mine_train_C4_text_document\.bin: already exists; "):
        export(tmp_path / "out", manifest, tmp_path / "megatron/mine")
