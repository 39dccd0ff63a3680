import base64
import random
import re
from collections import Counter

import pytest
import tiktoken
from prep_fakes import UNFILTERED, options, text
from tokenizers import Tokenizer, models

from data_prep.manifest import load_manifest
from data_prep.prepare import prepare
from data_prep.tokenization.vocabularies import end_of_document, load_saved_tokenizer, open_tokenizer
from megatron_ext.utils.errors import UserError

TEXTS = ["plain text", "", "naïve 東京 🦆\0", "aaaaaaaaab", "  spaces\n\n", "<|endoftext|> inside", text(1, 300)]
PATTERN = r"\p{L}+|[^\p{L}]"


def rwkv_lines(tokens: list[bytes]) -> str:
    def literal(token: bytes) -> str:
        try:
            return repr(token.decode())
        except UnicodeDecodeError:
            return repr(token)

    return "".join(f"{number} {literal(token)} {len(token)}\n" for number, token in enumerate(tokens, start=1))


@pytest.fixture
def rwkv(tmp_path):
    """Write an RWKV world vocabulary: all bytes, then pieces of the texts, some of which split a character."""
    dice, joined = random.Random(0), "".join(TEXTS).encode()
    starts = [dice.randrange(len(joined)) for _ in range(400)]
    pieces = {joined[start : start + dice.randint(2, 9)] for start in starts} | {b"a" * 3, b"a" * 5}
    tokens = [bytes([byte]) for byte in range(256)] + sorted(piece for piece in pieces if len(piece) > 1)
    path = tmp_path / "vocab.txt"
    path.write_text(rwkv_lines(tokens), encoding="utf-8")
    return path, {token: number for number, token in enumerate(tokens, start=1)}


def longest_first(content: bytes, vocabulary: dict[bytes, int]) -> list[int]:
    ids = []
    while content:
        token = max((token for token in vocabulary if content.startswith(token)), key=len)
        ids.append(vocabulary[token])
        content = content[len(token) :]
    return ids


def test_rwkv_takes_the_longest_token_at_each_place(rwkv):
    path, vocabulary = rwkv
    tokenizer = open_tokenizer(str(path))
    assert tokenizer.kind == "rwkv"
    assert tokenizer.vocab_size == len(vocabulary) + 1
    assert end_of_document(tokenizer) == ("<|endoftext|>", 0)
    encoded = tokenizer.encode_batch(TEXTS)
    assert encoded == [longest_first(content.encode(), vocabulary) for content in TEXTS]
    assert [tokenizer.decode(ids) for ids in encoded] == TEXTS


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("257 'ab' 3", ":257: states a length of 3 bytes, but has 2; "),
        ("257 ab 2", ":257: is not a line of an RWKV vocabulary; "),
        ("257 b'\\x' 1", ":257: has no Python literal "),
        ("0 'ab' 2", ":257: has the id 0, which is already used; "),  # the id of the end-of-document token
        ("7 'ab' 2", ":257: has the id 7, which is already used; "),
        ("257 '' 0", ":257: has no bytes; "),
    ],
)
def test_damaged_rwkv_vocabulary_names_the_line(tmp_path, line, problem):
    path = tmp_path / "vocab.txt"
    path.write_text(rwkv_lines([bytes([byte]) for byte in range(256)]) + line)
    with pytest.raises(UserError) as caught:
        open_tokenizer(str(path))
    assert str(caught.value).startswith(f"{path}{problem}")


def test_rwkv_vocabulary_without_a_byte(tmp_path):
    path = tmp_path / "vocab.txt"
    path.write_text(rwkv_lines([bytes([byte]) for byte in range(255)]))
    with pytest.raises(UserError, match=r"has no token for byte 255; "):
        open_tokenizer(str(path))


@pytest.fixture
def ranks(tmp_path):
    tokens = [bytes([byte]) for byte in range(256)] + [b"al", b"pha", b"alpha", b"be", b"eta", b"in"]
    path = tmp_path / "mine.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)))
    return path, {token: rank for rank, token in enumerate(tokens)}


def test_tiktoken_file_with_its_pattern(ranks):
    path, table = ranks
    tokenizer = open_tokenizer(str(path), PATTERN)
    reference = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=table, special_tokens={})
    assert tokenizer.encode_batch(TEXTS) == [reference.encode_ordinary(content) for content in TEXTS]
    assert (tokenizer.kind, tokenizer.vocab_size) == ("tiktoken", len(table) + 1)
    assert end_of_document(tokenizer) == ("<|endoftext|>", len(table))
    assert tokenizer.content() == path.read_bytes()


def test_tiktoken_file_at_fault(ranks, tmp_path):
    path, _table = ranks
    with pytest.raises(
        UserError, match=r"^--tiktoken-pattern: .*mine.tiktoken does not contain the pattern that splits text"
    ):
        open_tokenizer(str(path))
    with pytest.raises(UserError, match=r"^--tiktoken-pattern: '\(' cannot be used "):
        open_tokenizer(str(path), "(")
    with pytest.raises(UserError, match=r"^--tokenizer: absent.tiktoken is not a file; "):
        open_tokenizer("absent.tiktoken")
    path.write_text("no base64\n")
    with pytest.raises(UserError, match=r"is not a .tiktoken file "):
        open_tokenizer(str(path), PATTERN)


def test_a_file_called_like_an_encoding_must_be_it(ranks, tmp_path, monkeypatch):
    def offline(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(tiktoken.load, "read_file", offline)
    path = ranks[0].rename(tmp_path / "cl100k_base.tiktoken")
    with pytest.raises(
        UserError, match=r"^--tokenizer: cl100k_base cannot be loaded \(no network in tests\); give its "
    ):
        open_tokenizer(str(path))


def test_tiktoken_file_without_a_byte(ranks):
    path, table = ranks
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:169] + lines[170:]))
    assert table[b"\xa9"] == 169
    with pytest.raises(UserError, match=r"^--tokenizer: mine has no token for byte 169; give one that"):
        open_tokenizer(str(path), PATTERN)


def test_unencodable_documents_stop_or_are_skipped(records, tmp_path):
    path, out = tmp_path / "tokenizer.json", tmp_path / "out"
    letters = sorted({*"".join(map(text, range(50))), *(chr(code) for code in range(32, 127))} - {"東"})
    Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate([*letters, "</s>"])}, merges=[])).save(str(path))
    with pytest.raises(UserError) as caught:
        prepare(options(records, out, path, filtering=UNFILTERED))
    assert re.fullmatch(
        r"a.jsonl.zst:\d+: the tokenizer has no token for its text \(for example '東京'\); "
        r"give a byte-level tokenizer, which encodes any text, or pass --on-error skip",
        str(caught.value),
    )
    manifest = prepare(options(records, out, path, on_error="skip", filtering=UNFILTERED))
    given = [
        (name, text(f"{tag}{domain}{i}", 5 + i % 60))
        for name, tag, domains, count in (
            ("a.jsonl.zst", "", ("C4", "CommonCrawl", "ArXiv"), 20),
            ("b.jsonl", "more ", ("C4", "ArXiv"), 15),
        )
        for domain in domains
        for i in range(count)
    ]
    lost = Counter(name for name, content in given if "東" in content)
    assert {entry.file: entry.records for entry in manifest.skipped} == lost
    assert {entry.reason for entry in manifest.skipped} == {"the tokenizer has no token for its text"}
    assert sum(entry.characters for entry in manifest.domains) == sum(len(c) for _, c in given if "東" not in c)


@pytest.mark.parametrize("kind", ["rwkv", "tiktoken", "huggingface"])
def test_prepare_and_reload_any_tokenizer(kind, request, records, tmp_path, tokenizer_file):
    path = (
        tokenizer_file if kind == "huggingface" else request.getfixturevalue({"tiktoken": "ranks"}.get(kind, kind))[0]
    )
    manifest = prepare(options(records, tmp_path / "out", path, tiktoken_pattern=PATTERN, filtering=UNFILTERED))
    entry = load_manifest(tmp_path / "out").tokenizer
    assert (entry, entry.kind) == (manifest.tokenizer, kind)
    assert (tmp_path / "out" / entry.file).read_bytes() == path.read_bytes()
    saved = load_saved_tokenizer(tmp_path / "out", entry)
    assert saved.encode_batch(TEXTS) == open_tokenizer(str(path), PATTERN).encode_batch(TEXTS)
    if kind == "huggingface":
        library = Tokenizer.from_file(str(path))
        library.encode_special_tokens = True
        assert saved.encode_batch(TEXTS) == [library.encode(content, add_special_tokens=False).ids for content in TEXTS]
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
