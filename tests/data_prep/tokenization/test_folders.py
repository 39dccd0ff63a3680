"""Folders of Hugging Face tokenizers, compared with transformers on the same files."""

import json

import pytest
import transformers
from prep_fakes import UNFILTERED, options, text
from tokenizers import Tokenizer

from data_prep.prepare import prepare
from data_prep.tokenization.vocabularies import end_of_document, open_tokenizer, tokenizer_files
from megatron_ext.utils.errors import UserError

TEXTS = ["plain text", " two  spaces ", "naïve 東京 🦆", "<|endoftext|> inside", "it's 12 o'clock\n\n", text(1, 100)]


@pytest.fixture
def slow(tmp_path, tokenizer_file):
    """Folder with only vocab.json and merges.txt, as older models have."""
    folder = tmp_path / "slow"
    folder.mkdir()
    model = json.loads(tokenizer_file.read_bytes())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [one if isinstance(one, str) else " ".join(one) for one in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


def test_vocabulary_and_merges(slow):
    tokenizer = open_tokenizer(str(slow))
    reference = transformers.GPT2Tokenizer.from_pretrained(slow)
    assert end_of_document(tokenizer) == ("<|endoftext|>", reference.convert_tokens_to_ids("<|endoftext|>"))
    special = {"split_special_tokens": True, "add_special_tokens": False}
    assert tokenizer.encode_batch(TEXTS) == [reference(one, **special)["input_ids"] for one in TEXTS]
    assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(TEXTS)] == TEXTS
    assert open_tokenizer(str(slow / "vocab.json")).content() == tokenizer.content()
    assert [path.name for path in tokenizer_files(str(slow))] == ["vocab.json", "merges.txt"]


def test_added_tokens_keep_their_ids(slow):
    size = len(json.loads((slow / "vocab.json").read_bytes()))
    (slow / "added_tokens.json").write_text(json.dumps({"<pad>": size + 1, "<|im_end|>": size}))
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": {"content": "<|im_end|>", "special": True}}
    (slow / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = open_tokenizer(str(slow))
    assert end_of_document(tokenizer) == ("<|im_end|>", size)
    assert tokenizer.decode([size, size + 1]) == "<|im_end|><pad>"
    assert size not in tokenizer.encode_batch(["a<|im_end|>b"])[0]
    (slow / "added_tokens.json").write_text(json.dumps({"<pad>": size + 7}))
    with pytest.raises(UserError, match=rf"^--tokenizer: .* gives <pad> the id {size + 7}, which does not fit its v"):
        open_tokenizer(str(slow))


def test_a_folder_with_a_tokenizer_json(tmp_path, tokenizer_file):
    library = Tokenizer.from_file(str(tokenizer_file))
    library.add_special_tokens(["<|end_of_turn|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|end_of_turn|>", "auto_map": {"AutoTokenizer": "x.Y"}}'
    )
    (tmp_path / "x.py").write_text("raise SystemExit('code was run')")
    tokenizer = open_tokenizer(str(tmp_path))
    assert end_of_document(tokenizer)[0] == "<|end_of_turn|>"
    assert tokenizer.content() == (tmp_path / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"has neither tokenizer.json nor vocab.json and merges.txt; save a tokenizer.json with the library"),
        ({"tokenizer.model": b""}, r"has neither .*, but a SentencePiece model; save a tokenizer.json with"),
        ({"qwen.tiktoken": b"", "tokenization_qwen.py": b""}, r", but a .tiktoken file and code, which is never run; "),
        (
            {"vocab.json": b"{}", "merges.txt": b""},
            r"lacks tokens for 256 of the 256 bytes, so it is not byte-level BPE",
        ),
        ({"vocab.json": b"[", "merges.txt": b""}, r"vocab.json and merges.txt cannot be read \("),
        ({"tokenizer_config.json": b"["}, r"tokenizer_config.json is not JSON \("),
        ({"tokenizer_config.json": b"[" * 100_000}, r"tokenizer_config.json is not JSON \("),
        ({"special_tokens_map.json": b"[]"}, r"special_tokens_map.json is not a JSON object; "),
        ({"tokenizer.json": b"{}"}, r"tokenizer.json is not a tokenizer.json \("),
        (
            {"vocab.json": b"{}", "merges.txt": b"", "tokenizer_config.json": b'{"tokenizer_class": "Qwen2Tokenizer"}'},
            r"has no tokenizer.json, and a Qwen2Tokenizer may split text differently from GPT-2's; save a ",
        ),
    ],
)
def test_folders_that_cannot_be_read(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_tokenizer(str(tmp_path))


def test_prepared_with_a_folder(slow, records, tmp_path, tokenizer_file):
    """Shards equal those made with the tokenizer.json that the files come from."""
    manifest = prepare(options(records, tmp_path / "out", slow, filtering=UNFILTERED))
    other = prepare(options(records, tmp_path / "other", tokenizer_file, filtering=UNFILTERED))
    assert [entry.shards for entry in manifest.domains] == [entry.shards for entry in other.domains]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
