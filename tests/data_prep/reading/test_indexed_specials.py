"""Special tokens in other people's Megatron files: recognised by id at both ends and inside, and counted."""

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from prep_fakes import options, text
from tokenizers import AddedToken, Tokenizer, processors

from data_prep.documents import Problems
from data_prep.prepare import prepare
from data_prep.reading.corpus import open_files
from data_prep.summary import format_summary
from data_prep.tokenization.vocabularies import open_tokenizer

END, BEGIN, PAD, ROLE = "<|endoftext|>", "<s>", "<pad>", "<|user|>"


@pytest.fixture(scope="module")
def source(tokenizer_file, tmp_path_factory):
    """Path and tokenizer with four special tokens, one of which only the tokenizer's template declares."""
    library = Tokenizer.from_file(str(tokenizer_file))
    library.add_special_tokens([PAD, ROLE])
    library.add_tokens([AddedToken(BEGIN, special=False)])
    begin = library.token_to_id(BEGIN)
    library.post_processor = processors.TemplateProcessing(f"{BEGIN} $A", None, [(BEGIN, begin)])
    path = tmp_path_factory.mktemp("source") / "tokenizer.json"
    library.save(str(path))
    return path, library


def write(folder, library, documents):
    folder.mkdir(exist_ok=True)
    builder = IndexedDatasetBuilder(str(folder / "Law_text_document.bin"), dtype=np.uint16)
    for document in documents:
        ids = []
        for piece in document:
            special = library.token_to_id(piece) if piece in (END, BEGIN, PAD, ROLE) else None
            ids += library.encode(piece, add_special_tokens=False).ids if special is None else [special]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(folder / "Law_text_document.idx"))


CASES = [
    (["one", END], ["one"], ()),
    (["one"], ["one"], ()),
    ([BEGIN, "one", END], ["one"], ("special_tokens",)),
    ([BEGIN, BEGIN, "one", END, END, PAD, PAD], ["one"], ("special_tokens",)),
    ([END, "one"], ["one"], ("special_tokens",)),
    ([BEGIN, "one", END, BEGIN, "two", END, "three", END], ["one", "two", "three"], ("special_tokens", "parted")),
    (["one", END, END, "two"], ["one", "two"], ("special_tokens", "parted")),
    ([ROLE, "one ", PAD, "two", END], ["one two"], ("special_tokens",)),
]


@pytest.mark.parametrize(("document", "texts", "changes"), CASES)
def test_special_ids_are_removed(tmp_path, source, document, texts, changes):
    path, library = source
    write(tmp_path / "raw", library, [["before", END], document, ["after", END]])
    found = list(open_files(tmp_path / "raw", tokenizer=open_tokenizer(str(path))).documents(Problems()))
    assert [one.text for one in found] == ["before", *texts, "after"]
    assert [one.changes for one in found] == [(), *[changes] * len(texts), ()]
    assert len({one.id for one in found}) == len(found)


def test_document_of_special_tokens_only(tmp_path, source):
    path, library = source
    write(tmp_path / "raw", library, [[BEGIN, END], ["one", END]])
    problems = Problems("skip")
    found = list(open_files(tmp_path / "raw", tokenizer=open_tokenizer(str(path))).documents(problems))
    assert ([one.text for one in found], sum(problems.counts.values())) == (["one"], 1)


def test_text_of_a_special_token_is_kept(tmp_path, source):
    path, library = source
    spelled = library.encode("a <pad> b", add_special_tokens=False)
    library = Tokenizer.from_file(str(path))
    library.encode_special_tokens = True
    assert spelled.ids != library.encode("a <pad> b", add_special_tokens=False).ids
    write(tmp_path / "raw", library, [["a <pad> b", END]])
    (found,) = open_files(tmp_path / "raw", tokenizer=open_tokenizer(str(path))).documents(Problems())
    assert (found.text, found.changes) == ("a <pad> b", ())


def test_removed_special_tokens_are_counted(tmp_path, source, tokenizer_file):
    path, library = source
    documents = [[BEGIN, text(number), END, text(-1 - number), END] for number in range(10)]
    write(tmp_path / "raw", library, [*documents, [text(99), END]])
    out = tmp_path / "out"
    given = {"train_domains": ["Law"], "test_domains": [], "source_tokenizer": str(path), "validation_fraction": 0.0}
    manifest = prepare(options(tmp_path / "raw", out, tokenizer_file, **given))
    assert {(one.split, one.reason): one.documents for one in manifest.cleaned} == {
        ("train", "parted"): 20,
        ("train", "special_tokens"): 20,
    }
    (entry,) = manifest.domains
    texts = [text(number) for number in (*range(10), *(-1 - n for n in range(10)), 99)]
    assert (entry.documents, entry.characters) == (21, sum(map(len, texts)))
    output = format_summary(manifest, str(out))
    assert "cleaned: 20 in train: special tokens of --source-tokenizer removed" in output
    assert "cleaned: 20 in train: split at end-of-document tokens" in output
