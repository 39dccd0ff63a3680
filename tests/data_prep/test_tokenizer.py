import numpy as np
import pytest
from datatrove.data import Document
from prep_fakes import text
from tokenizers import Tokenizer, models, pre_tokenizers

from data_prep.documents import Problems
from data_prep.manifest import TokenizerEntry
from data_prep.tokenizer import JsonTokenizer, load_tokenizer, train_tokenizer
from data_prep.vocabularies import end_of_document, token_dtype
from data_prep.writing import DocumentEncoder
from megatron_ext.errors import UserError


def wrap(*vocabulary: str) -> JsonTokenizer:
    return JsonTokenizer(words(*vocabulary))


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer([text(seed, 100) for seed in range(8)], 400)


def words(*vocabulary: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token=vocabulary[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def tokens_of(tokenizer: Tokenizer, texts: list[str], eos_id: int, on_error: str = "stop") -> list[np.ndarray]:
    wrapped = JsonTokenizer(tokenizer)
    entry = TokenizerEntry("x", "x", wrapped.vocab_size, "x", eos_id)
    encode = DocumentEncoder(wrapped, entry, Problems(on_error))
    documents = [Document(text, "id", metadata={"source": "file"}) for text in texts]
    return [tokens for _, tokens in encode(documents)]


@pytest.mark.parametrize("content", ["plain", " leading", "tab\tline\r\n\n", "日本語 🦆 \0 é", "<|endoftext|> inside"])
def test_any_text_comes_back_to_the_letter(trained, content):
    (tokens,) = tokens_of(trained, [content], 0)
    assert tokens.dtype == np.dtype("<u2")
    assert tokens[-1] == 0
    assert 0 not in tokens[:-1]  # text cannot end a document
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
    assert end_of_document(wrap("a", "b"), "b") == ("b", 1)
    with pytest.raises(UserError, match=r"^--tokenizer: .*name it with --eos-token TOKEN$"):
        end_of_document(wrap("a", "b"))
    with pytest.raises(UserError, match=r"^--eos-token: c is not in the tokenizer's vocabulary; "):
        end_of_document(wrap("a", "</s>"), "c")


def test_truncation_padding_and_templates_of_the_file_do_not_apply():
    tokenizer = words("a", "b", "</s>")
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    tokenizer.model.unk_token = "</s>"
    short, long = tokens_of(tokenizer, ["b", "a b a b a"], 2)
    assert short.tolist() == [1, 2]
    assert long.tolist() == [0, 1, 0, 1, 0, 2]


def test_text_that_a_tokenizer_has_no_token_for_is_refused_or_counted():
    with pytest.raises(UserError, match=r"^file: the tokenizer cannot encode it \(id\); "):
        tokens_of(words("[UNK]", "b", "</s>"), ["b", "b c"], 2)
    assert [item.tolist() for item in tokens_of(words("[UNK]", "b", "</s>"), ["b", "b c"], 2, "skip")] == [[1, 2]]


def test_vocabulary_size_covers_gaps_in_the_ids():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 70000}, unk_token="a"))
    assert JsonTokenizer(tokenizer).vocab_size == 70001
    assert [token_dtype(size) for size in (65535, 65536, 70001)] == ["uint16", "uint32", "uint32"]


@pytest.mark.parametrize("content", [None, "{}", "no json\nat all"])
def test_no_tokenizer_there(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        load_tokenizer(path)
    assert str(caught.value).startswith(f"--tokenizer: {path} is no ")
    assert "\n" not in str(caught.value)
