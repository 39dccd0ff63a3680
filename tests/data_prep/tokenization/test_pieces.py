"""Long texts encoded in pieces: the tokens are the same as for the whole text."""

import pytest
from datatrove.data import Document
from prep_fakes import text
from tokenizers import Tokenizer, models, normalizers

from data_prep.documents import Problems
from data_prep.manifest import TokenizerEntry
from data_prep.output.writing import DocumentEncoder
from data_prep.tokenization import pieces
from data_prep.tokenization.pieces import NoCutError, encode_by_parts
from data_prep.tokenization.tokenizer import JsonTokenizer, load_tokenizer
from megatron_ext.utils.errors import UserError


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr("data_prep.output.writing.PIECE_CHARACTERS", 300)
    monkeypatch.setattr(pieces, "MAX_PIECE_BYTES", 1000)


def test_parts_give_the_tokens_of_the_whole_text(small, tokenizer_file):
    library = Tokenizer.from_file(str(tokenizer_file))
    encode = JsonTokenizer(load_tokenizer(tokenizer_file)).encode_batch
    for seed in range(5):
        content = text(seed, 2000)
        parts = list(pieces.pieces(encode, content))
        assert len(parts) > 20
        assert "".join(parts) == content
        assert encode_by_parts(encode, content) == library.encode(content, add_special_tokens=False).ids


def test_tokenizer_with_a_prefix_encodes_whole_texts(small):
    library = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("▁ab c\n")}, merges=[]))
    library.normalizer = normalizers.Prepend("▁")
    encode = JsonTokenizer(library).encode_batch
    content = "a b c\n" * 100
    assert encode_by_parts(encode, content) == library.encode(content).ids
    with pytest.raises(NoCutError, match="1,200 characters"):
        encode_by_parts(encode, content * 2)


def test_text_without_a_position_to_cut(small, tokenizer_file):
    tokenizer = JsonTokenizer(load_tokenizer(tokenizer_file))
    entry = TokenizerEntry("x", "x", tokenizer.vocab_size, "x", 0)
    problems = Problems("skip")
    unbroken = Document("a" * 1001, "file:7", metadata={"source": "file"})
    assert list(DocumentEncoder(tokenizer, entry, problems)([unbroken])) == []
    assert dict(problems.counts) == {("file", "too long"): 1}
    with pytest.raises(UserError, match=r"^file: too long \(file:7: 1,001 characters without a place to split\)"):
        list(DocumentEncoder(tokenizer, entry, Problems("stop"))([unbroken]))
