"""Tokenizers saved in a run encode like their originals, for every kind."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_prep.manifest import TokenizerEntry
from data_prep.tokenization.vocabularies import TextTokenizer, open_tokenizer, save_tokenizer
from megatron_ext.runs.tokenizer import ENTRY, UNREADABLE, RunTokenizer, store_tokenizer, stored_tokenizer
from megatron_ext.utils.errors import UserError

TEXT = "plain text, na\u00efve \u6771\u4eac \U0001f986 <|endoftext|> inside"
PATTERN = r"\p{L}+|[^\p{L}]"
BYTES = [bytes([byte]) for byte in range(256)]


def _tiktoken(folder: Path) -> tuple[TextTokenizer, list[int]]:
    ranks = {token: rank for rank, token in enumerate([*BYTES, b"pl", b"in"])}
    path = folder / "own.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))
    library = tiktoken.Encoding("own", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    return open_tokenizer(str(path), PATTERN), library.encode_ordinary(TEXT)


def _rwkv(folder: Path) -> tuple[TextTokenizer, list[int]]:
    path = folder / "vocab.txt"
    path.write_text("".join(f"{number} {token!r} 1\n" for number, token in enumerate(BYTES, start=1)))
    return open_tokenizer(str(path)), [byte + 1 for byte in TEXT.encode()]


def _json(folder: Path) -> tuple[TextTokenizer, list[int]]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    expected = library.encode(TEXT).ids
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(folder / "own.json"))
    return open_tokenizer(str(folder / "own.json")), expected


@pytest.mark.parametrize(
    ("make", "end"), [(_tiktoken, 258), (_rwkv, 0), (_json, 256)], ids=["tiktoken", "rwkv", "json"]
)
def test_run_stores_every_kind_of_tokenizer(make, end: int, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    run.mkdir()
    tokenizer, expected = make(tmp_path)
    entry = save_tokenizer(data, tokenizer, ("<|endoftext|>", end))
    store_tokenizer(data / entry.file, entry, run)
    tokenizer = stored_tokenizer(run)
    assert tokenizer is not None
    assert tokenizer.encode(TEXT) == expected  # the end-of-document token's name encodes as text
    assert tokenizer.decode(expected) == TEXT
    assert (tokenizer.end_id, tokenizer.end_id_or_none, tokenizer.size) == (end, end, entry.vocab_size)
    assert (run / "tokenizer.json").exists() == (entry.kind == "huggingface")  # only this kind has the file


@pytest.mark.parametrize("make", [_tiktoken, _rwkv, _json], ids=["tiktoken", "rwkv", "json"])
def test_unknown_token_ids_have_no_text(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """The model has rows for these ids: gaps in the vocabulary, and the padding."""
    tokenizer, tokens = make(tmp_path)
    end = ("<|endoftext|>", 0 if make is _rwkv else 270 if make is _tiktoken else 256)
    entry = save_tokenizer(tmp_path, tokenizer, end)
    store_tokenizer(tmp_path / entry.file, entry, tmp_path)
    tokenizer = stored_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode([265, *tokens[:5], 265, 383, *tokens[5:]]) == TEXT
    assert tokenizer.decode([265]) == ""


@pytest.mark.parametrize("make", [_tiktoken, _rwkv, _json], ids=["tiktoken", "rwkv", "json"])
def test_texts_of_tokens(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tokenizer, _ = make(tmp_path)
    run = RunTokenizer(tokenizer, None, 300)
    texts = run.token_texts(300)
    assert [texts[token] for token in run.encode(" a (na")] == [" ", "a", " ", "(", "n", "a"]
    assert {texts[token] for token in run.encode("\u6771")} == {UNREADABLE}
    assert texts[299] == ""
    assert run.special_ids == tokenizer.special


def test_texts_of_tokens_keep_their_spaces(tmp_path: Path) -> None:
    """SentencePiece's decoder drops a space at the beginning, and WordPiece's joins words with spaces."""
    words = {"[UNK]": 0, "a": 1, "\u2581a": 2, "\u2581the": 3, "ing": 4, "<0x0A>": 5, "<0xE4>": 6, "##s": 7, ".": 8}
    pieces = Tokenizer(models.BPE(vocab=words, merges=[]))
    pieces.pre_tokenizer = pre_tokenizers.Metaspace()
    byte_fallback = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    pieces.decoder = decoders.Sequence(byte_fallback)
    assert _token_texts(pieces, tmp_path)[1:7] == ["a", " a", " the", "ing", "\n", UNREADABLE]
    parts = Tokenizer(models.WordPiece(vocab=words, unk_token="[UNK]"))
    parts.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    parts.decoder = decoders.WordPiece()
    found = _token_texts(parts, tmp_path)
    assert (found[1], found[7], found[8]) == (" a", "s", ".")


def _token_texts(library: Tokenizer, folder: Path) -> list[str]:
    library.save(str(folder / "own.json"))
    run = RunTokenizer(open_tokenizer(str(folder / "own.json")), None, 9)
    return run.token_texts(9)


def test_text_without_a_token_is_named(tmp_path: Path) -> None:
    library = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "letters.json"))
    tokenizer = open_tokenizer(str(tmp_path / "letters.json"))
    store_tokenizer(tmp_path / "letters.json", save_tokenizer(tmp_path, tokenizer, ("<|endoftext|>", 2)), tmp_path)
    tokenizer = stored_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("ab ba") == [0, 1, 1, 0]
    line = "the run's tokenizer: has no token for text such as 'bxa', and no unknown token; remove it from the text"
    with pytest.raises(UserError, match=f"^{line}$"):
        tokenizer.encode("ab bxa ba")


def test_missing_tokenizer_and_invalid_entry(tmp_path: Path) -> None:
    assert stored_tokenizer(tmp_path) is None
    (tmp_path / ENTRY).write_text(json.dumps({"file": "x"}))
    with pytest.raises(UserError, match=rf"{ENTRY}: cannot be read; copy it again"):
        stored_tokenizer(tmp_path)


def test_unknown_end_of_document_token(tmp_path: Path) -> None:
    tokenizer, _ = _json(tmp_path)
    entry = TokenizerEntry("own.json", "", tokenizer.vocab_size, "[none]", 0)
    store_tokenizer(tmp_path / "own.json", entry, tmp_path)
    tokenizer = stored_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.end_id_or_none is None
    with pytest.raises(UserError, match="its end-of-document token is unknown; set eos_token"):
        _ = tokenizer.end_id
