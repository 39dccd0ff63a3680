import numpy as np
import pytest
from datatrove.data import Document
from prep_fakes import text
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from data_prep.documents import Problems
from data_prep.manifest import TokenizerEntry
from data_prep.output.writing import DocumentEncoder
from data_prep.tokenization import tokenizer as tokenizer_module
from data_prep.tokenization.tokenizer import JsonTokenizer, load_tokenizer, train_tokenizer
from data_prep.tokenization.vocabularies import (
    end_of_document,
    load_saved_tokenizer,
    open_tokenizer,
    save_tokenizer,
    token_dtype,
)
from megatron_ext.utils.errors import UserError


def wrap(*vocabulary: str) -> JsonTokenizer:
    return JsonTokenizer(words(*vocabulary))


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer([text(seed, 100) for seed in range(8)], 400)


def words(*vocabulary: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([word for word in vocabulary if word.startswith("<")])
    return tokenizer


def prepared_tokens(tokenizer: Tokenizer, texts: list[str], eos_id: int, on_error: str = "stop") -> list[np.ndarray]:
    wrapped = JsonTokenizer(tokenizer)
    entry = TokenizerEntry("x", "x", wrapped.vocab_size, "x", eos_id)
    encode = DocumentEncoder(wrapped, entry, Problems(on_error))
    documents = [Document(text, "id", metadata={"source": "file"}) for text in texts]
    return [tokens for _, tokens in encode(documents)]


@pytest.mark.parametrize("content", ["plain", " leading", "tab\tline\r\n\n", "日本語 🦆 \0 é", "<|endoftext|> inside"])
def test_text_round_trip(trained, content):
    (tokens,) = prepared_tokens(trained, [content], 0)
    assert tokens.dtype == np.dtype("<u2")
    assert tokens[-1] == 0
    assert 0 not in tokens[:-1]  # text cannot contain the end-of-document token
    assert trained.decode(tokens[:-1].tolist()) == content


def test_training_is_repeatable(trained):
    again = train_tokenizer((text(seed, 100) for seed in range(8)), 400)
    assert again.to_str() == trained.to_str()
    assert trained.get_vocab_size() <= 400
    assert end_of_document(JsonTokenizer(trained)) == ("<|endoftext|>", 0)


def test_smallest_vocabulary():
    assert train_tokenizer(["some text"], 257).get_vocab_size() == 257
    with pytest.raises(UserError, match=r"^--vocab-size: 256 is below 257"):
        train_tokenizer(["some text"], 256)


def test_end_of_document_is_found_or_named():
    assert end_of_document(wrap("a", "</s>", "<eos>")) == ("</s>", 1)
    assert end_of_document(wrap("a", "<b>"), "<b>") == ("<b>", 1)
    with pytest.raises(UserError, match=r"^--tokenizer: .*choose one with --eos-token TOKEN$"):
        end_of_document(wrap("a", "b"))
    with pytest.raises(UserError, match=r"^--eos-token: c is not in the tokenizer's vocabulary; "):
        end_of_document(wrap("a", "</s>"), "c")


@pytest.mark.parametrize("word", ["b", "Ġhello"])
def test_a_word_of_text_cannot_end_documents(trained, word):
    tokenizer = wrap("a", "b") if word == "b" else JsonTokenizer(trained)
    given = word if word == "b" else trained.id_to_token(trained.encode(" alpha").ids[0])
    with pytest.raises(UserError) as caught:
        end_of_document(tokenizer, given)
    assert str(caught.value) == (
        f"--eos-token: {given} also encodes ordinary text, so documents would end in the middle; "
        "choose a special token of the tokenizer"
    )


@pytest.mark.parametrize("flags", [{}, {"lstrip": True, "rstrip": True}, {"normalized": True, "single_word": True}])
def test_end_token_without_special_flag(trained, tmp_path, flags):
    """An added token without the special flag, as in handwritten files. The kept file is not modified."""
    library = Tokenizer.from_str(trained.to_str())
    library.add_tokens([AddedToken("</s>", special=False, **flags)])
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    end = library.token_to_id("</s>")
    assert end in library.encode("x </s> y").ids
    tokenizer = open_tokenizer(str(path))
    entry = save_tokenizer(tmp_path, tokenizer, end_of_document(tokenizer, "</s>"))
    assert tokenizer.content() == (tmp_path / "tokenizer.json").read_bytes()
    for one in (tokenizer, load_saved_tokenizer(tmp_path, entry)):
        encode = DocumentEncoder(one, entry, Problems())
        content = ["x </s> y", "</s>", "a</s></s>b", "\n</s>\n"]
        found = [tokens.tolist() for _, tokens in encode([Document(one, "id", metadata={}) for one in content])]
        assert [tokens.count(end) for tokens in found] == [1] * len(content)
        assert [library.decode(tokens[:-1]) for tokens in found] == content


def test_document_encoded_as_the_end_token():
    """A Unigram piece equal to the end token, which no flag can disable."""
    library = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0), ("b", -2.0), ("▁", -2.5)], 0))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.add_special_tokens(["</s>"])
    tokenizer = JsonTokenizer(library)
    assert end_of_document(tokenizer) == ("</s>", 1)
    assert [item.tolist() for item in prepared_tokens(library, ["a b", "a </s> b", "b"], 1, "skip")] == [
        [4, 2, 4, 3, 1],
        [4, 3, 1],
    ]
    with pytest.raises(UserError, match="file:id: some of its text is encoded as the end-of-document token; repair it"):
        prepared_tokens(library, ["a </s> b"], 1)


def test_truncation_padding_and_templates_are_disabled():
    tokenizer = words("a", "b", "</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.model.unk_token = "</s>"
    short, long = prepared_tokens(tokenizer, ["b", "a b a b a"], 2)
    assert short.tolist() == [1, 2]
    assert long.tolist() == [0, 1, 0, 1, 0, 2]


LETTERS = {"a": 0, "b": 1, "</s>": 2}
WITH_UNKNOWN = {**LETTERS, "<unk>": 3}
SCORES = [(token, -1.0) for token in WITH_UNKNOWN]
SOME_BYTES = {**LETTERS, "<0xC3>": 4}
ALL_BYTES = {**LETTERS, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
LOSING = {
    "BPE": models.BPE(vocab=LETTERS, merges=[]),
    "BPE with an unknown token": models.BPE(vocab=WITH_UNKNOWN, merges=[], unk_token="<unk>"),
    "BPE of some bytes": models.BPE(vocab=SOME_BYTES, merges=[], byte_fallback=True),
    "BPE of some bytes, unknown": models.BPE(
        vocab={**WITH_UNKNOWN, "<0xC3>": 4}, merges=[], unk_token="<unk>", byte_fallback=True
    ),
    "Unigram": models.Unigram(SCORES[:3], None, False),
    "Unigram with an unknown token": models.Unigram(SCORES, 3, False),
    "WordLevel": models.WordLevel(LETTERS),
    "WordLevel with an unknown token": models.WordLevel(WITH_UNKNOWN, unk_token="<unk>"),
    "WordPiece": models.WordPiece(LETTERS),
    "WordPiece with an unknown token": models.WordPiece(WITH_UNKNOWN, unk_token="<unk>"),
}


@pytest.mark.parametrize("name", LOSING)
def test_text_without_a_token_is_never_shortened(name):
    tokenizer = Tokenizer(LOSING[name])
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(UserError) as caught:
        prepared_tokens(tokenizer, ["a", "a é b"], 2)
    assert str(caught.value) == (
        "file:id: the tokenizer has no token for its text (for example 'é'); "
        "give a byte-level tokenizer, which encodes any text, or pass --on-error skip"
    )
    assert [item.tolist() for item in prepared_tokens(tokenizer, ["a", "a é b", "b"], 2, "skip")] == [[0, 2], [1, 2]]


def test_byte_fallback():
    tokenizer = Tokenizer(models.BPE(vocab=ALL_BYTES, merges=[], byte_fallback=True))
    (tokens,) = prepared_tokens(tokenizer, ["aéb"], 2)
    assert tokens.tolist() == [0, 3 + 0xC3, 3 + 0xA9, 1, 2]


def test_a_byte_level_vocabulary_without_a_byte():
    letters = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"©"})  # the character that represents byte 0xA9
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert [len(item) for item in prepared_tokens(tokenizer, ["aéb", "東京"], 0, "skip")] == [7]


def test_normalizer_changes_are_accepted():
    tokenizer = Tokenizer(models.BPE(vocab=LETTERS, merges=[]))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert [item.tolist() for item in prepared_tokens(tokenizer, [" Á b"], 2)] == [[0, 1, 2]]


def test_vocabulary_size_covers_gaps_in_the_ids():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70000}, unk_token="a"))
    assert JsonTokenizer(tokenizer).vocab_size == 70001
    assert [token_dtype(size) for size in (65535, 65536, 70001)] == ["uint16", "uint32", "uint32"]


@pytest.mark.parametrize("content", [None, "{}", "no json\nat all"])
def test_missing_tokenizer_file(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"--tokenizer: {path} is not a ")
    assert "\n" not in str(caught.value)


def test_long_words_are_cut_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training time is quadratic in word length: a document of ten megabytes without a space took hours."""
    monkeypatch.setattr(tokenizer_module, "MAX_WORD_LENGTH", 4000)
    word, spaces = "ab" * 4500 + "c" * 3000, " " * 10_001
    seen = list(tokenizer_module._first_characters([f"one {word}{spaces}two", "no"], 1 << 20))
    assert "".join(seen) == f"one {word}{spaces}twono"
    assert [len(x) for x in seen] == [4004, 4000, 4000 + 4000, 4000, 2001 + 3, 2]


def test_ordinary_texts_are_trained_on_whole() -> None:
    texts = ["w" * 10_000 + " " * 10_000 + "w", "", "two words"]
    seen = list(tokenizer_module._first_characters(texts, 1 << 20))
    assert seen == [text for text in texts if text]
