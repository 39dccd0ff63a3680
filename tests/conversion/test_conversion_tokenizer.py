"""Tokenizer files: conversion copies the tokenizer and all that transformers stores with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer

from data_prep.tokenization.tokenizer import JsonTokenizer
from megatron_ext.conversion.core.output_folder import README_MARK
from megatron_ext.conversion.huggingface import model_card
from megatron_ext.conversion.huggingface.families import FAMILIES
from megatron_ext.conversion.huggingface.families.selectron import AUTO_MAP
from megatron_ext.conversion.huggingface.model_card import format_card
from megatron_ext.runs.tokenizer_files import COMPANIONS, copy_tokenizer, find_tokenizer
from megatron_ext.utils.errors import UserError

FILES = {
    "tokenizer_config.json": json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    ),
    "special_tokens_map.json": json.dumps({"pad_token": "</s>"}),
    "chat_template.jinja": "{{ messages }}",
}


def tokenizer_in(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a")).save(str(folder / "tokenizer.json"))
    return folder


def content_of(path: Path) -> Any:
    return json.loads(path.read_text()) if path.suffix == ".json" else path.read_bytes()


def test_companion_files_are_copied(tmp_path: Path) -> None:
    source, copy = tokenizer_in(tmp_path / "source"), tmp_path / "copy"
    copy.mkdir()
    for name, content in FILES.items():
        (source / name).write_text(content)
    (source / "config.json").write_text("{}")  # a file of the model
    tokenizer = find_tokenizer(source)
    assert tokenizer is not None
    assert (tokenizer.begin_id, tokenizer.end, tokenizer.end_id, tokenizer.size) == (0, "</s>", 1, 3)
    copy_tokenizer(tokenizer, copy)
    assert set(FILES) <= set(COMPANIONS)
    assert {path.name for path in copy.iterdir()} == {"tokenizer.json", *FILES}
    for name in ["tokenizer.json", *FILES]:
        assert content_of(copy / name) == content_of(source / name)


@pytest.mark.parametrize("name", ["vocab.txt", "chat_template.jinja", "tokenizer_config.json"])
def test_a_link_out_of_its_folder_is_not_copied(tmp_path: Path, name: str) -> None:
    """The target of the link, perhaps a key, would be published with the export."""
    source, copy = tokenizer_in(tmp_path / "source"), tmp_path / "copy"
    copy.mkdir()
    (tmp_path / "key").write_text("{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "key")
    tokenizer = find_tokenizer(source)
    assert tokenizer is not None
    with pytest.raises(UserError, match=f"{name}: is a link out of its folder, to .*key"):
        copy_tokenizer(tokenizer, copy)
    assert not (copy / name).exists() or content_of(copy / name) != {}


def test_a_cache_of_links_is_copied(tmp_path: Path) -> None:
    for folder in ("model/snapshots", "model/blobs", "copy"):
        (tmp_path / folder).mkdir(parents=True)
    source, copy = tokenizer_in(tmp_path / "model" / "snapshots" / "0123"), tmp_path / "copy"
    (tmp_path / "model" / "blobs" / "cafe").write_text("a\n")
    (source / "vocab.txt").symlink_to("../../blobs/cafe")
    tokenizer = find_tokenizer(source)
    assert tokenizer is not None
    copy_tokenizer(tokenizer, copy)
    assert (copy / "vocab.txt").read_text() == "a\n"


def test_a_lone_tokenizer_gets_a_configuration_for_transformers(tmp_path: Path) -> None:
    tokenizer = find_tokenizer(tokenizer_in(tmp_path / "source"))
    assert tokenizer is not None
    assert (tokenizer.begin_id, tokenizer.end, tokenizer.end_id) == (None, None, None)
    (tmp_path / "copy").mkdir()
    copy_tokenizer(tokenizer, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "eos_token" not in config


@pytest.mark.slow
def test_a_round_trip_keeps_the_special_tokens(
    saved_run: Any, convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, run, back = tmp_path / "hf", tmp_path / "run", tmp_path / "back"
    assert convert(saved_run("attention*2", {"tensor": 2}), hf, "--to", "hf", "--no-verify") == 0
    assert "the source has no tokenizer to copy" in capsys.readouterr().err
    tokenizer_in(hf)
    for name, content in FILES.items():
        (hf / name).write_text(content)
    assert convert(hf, run, "--to", "megatron", "--no-verify") == 0
    assert convert(run, back, "--to", "hf", "--no-verify") == 0
    assert "no tokenizer" not in capsys.readouterr().err
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    for name in ["tokenizer.json", *FILES]:
        assert content_of(back / name) == content_of(hf / name)


TEMPLATE = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
BYTES = processors.ByteLevel(trim_offsets=False)
POST_PROCESSORS: dict[str, Any] = {
    "none": None,
    "template": TEMPLATE,
    "bert": processors.BertProcessing(("</s>", 1), ("<s>", 0)),
    "roberta": processors.RobertaProcessing(("</s>", 1), ("<s>", 0)),
    "sequence": processors.Sequence([BYTES, TEMPLATE]),
    "bytes": BYTES,
}


@pytest.mark.parametrize("kind", POST_PROCESSORS)
def test_an_exported_tokenizer_encodes_as_in_training(tmp_path: Path, kind: str) -> None:
    """transformers encodes equally, regardless of who wrote the tokenizer's configuration."""
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir(), copy.mkdir()
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1, "a": 2, "b": 3, "Ġ": 4}, [], byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if POST_PROCESSORS[kind] is not None:
        tokenizer.post_processor = POST_PROCESSORS[kind]
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(source / "tokenizer.json"))
    flags = {"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "tokenizer_class": "LlamaTokenizerFast"}
    (source / "tokenizer_config.json").write_text(json.dumps(flags))
    found = find_tokenizer(source)
    assert found is not None
    copy_tokenizer(found, copy, plain=True)
    (copy / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (trained,) = JsonTokenizer(tokenizer, source / "tokenizer.json").encode_batch(["ab ba ab"])
    assert trained == [2, 3, 4, 3, 2, 4, 2, 3]
    exported = AutoTokenizer.from_pretrained(str(copy))
    assert exported("ab ba ab")["input_ids"] == exported.encode("ab ba ab") == trained
    offsets = Tokenizer.from_file(str(copy / "tokenizer.json")).encode("ab ba ab").offsets
    tokenizer.no_truncation(), tokenizer.no_padding()
    assert offsets == tokenizer.encode("ab ba ab", add_special_tokens=False).offsets


def test_no_code_is_named(tmp_path: Path) -> None:
    """References to code in a foreign model's tokenizer are dropped. Its chat template stays."""
    source, copy = tokenizer_in(tmp_path / "source"), tmp_path / "copy"
    copy.mkdir()
    content = {
        "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]},
        "tokenizer_class": "X",
        "custom": {"path": "x.py"},
        "eos_token": "</s>",
        "add_bos_token": True,
    }
    (source / "tokenizer_config.json").write_text(json.dumps(content))
    (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>", "auto_map": {}}))
    tokenizer = find_tokenizer(source)
    assert tokenizer is not None
    copy_tokenizer(tokenizer, copy)
    expected = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "add_bos_token": True}
    assert json.loads((copy / "tokenizer_config.json").read_text()) == expected
    assert json.loads((copy / "special_tokens_map.json").read_text()) == {"eos_token": "</s>"}
    assert (copy / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_loading_takes_is_said(architecture: str) -> None:
    family = FAMILIES[architecture]
    text, loading_note = format_card(family, has_tokenizer=True, is_plain=True), model_card.loading_note(family)
    assert text.startswith(README_MARK)
    is_fla = not hasattr(transformers, architecture) and architecture != "SelectronForCausalLM"
    assert ("import fla" in text) == is_fla == ("import fla" in (loading_note or ""))
    assert ("trust_remote_code=True" in text) == (architecture == "SelectronForCausalLM")
    assert 'AutoTokenizer.from_pretrained(".", trust_remote_code=False)' in text
    assert "AutoTokenizer" not in format_card(family, has_tokenizer=False, is_plain=True)


def test_a_tokenizer_beside_our_code_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load as in the README. A prompt would fail without a terminal, and block with one."""
    copy_tokenizer(find_tokenizer(tokenizer_in(tmp_path)) or pytest.fail("no tokenizer"), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "selectron", "auto_map": AUTO_MAP}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks"))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path), trust_remote_code=False)
    assert tokenizer("a")["input_ids"] == [2]
