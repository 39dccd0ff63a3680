"""A tokenizer goes along with its model, and all that transformers keeps beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from megatron_ext.checkpoint.conversion.tokenizer_files import COMPANIONS, copy_tokenizer, kept_tokenizer

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


def test_what_lies_beside_it_is_copied(tmp_path: Path) -> None:
    source, copy = tokenizer_in(tmp_path / "source"), tmp_path / "copy"
    copy.mkdir()
    for name, content in FILES.items():
        (source / name).write_text(content)
    (source / "config.json").write_text("{}")  # the model's
    kept = kept_tokenizer(source)
    assert kept is not None
    assert (kept.begin_id, kept.end, kept.end_id, kept.size) == (0, "</s>", 1, 3)
    copy_tokenizer(kept, copy)
    assert set(FILES) <= set(COMPANIONS)
    found = {path.name: path.read_bytes() for path in copy.iterdir()}
    assert found == {name: (source / name).read_bytes() for name in ["tokenizer.json", *FILES]}


def test_alone_it_gets_what_transformers_must_know(tmp_path: Path) -> None:
    kept = kept_tokenizer(tokenizer_in(tmp_path / "source"))
    assert kept is not None
    assert (kept.begin_id, kept.end, kept.end_id) == (None, None, None)
    (tmp_path / "copy").mkdir()
    copy_tokenizer(kept, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "eos_token" not in config


@pytest.mark.slow
def test_a_foreign_models_tokens_come_back(
    saved_run: Any, convert: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, run, back = tmp_path / "hf", tmp_path / "run", tmp_path / "back"
    assert convert(saved_run("attention*2", {"tensor": 2}), hf, "--to", "hf", "--no-verify") == 0
    assert "no tokenizer is there to be copied" in capsys.readouterr().err
    tokenizer_in(hf)
    for name, content in FILES.items():
        (hf / name).write_text(content)
    assert convert(hf, run, "--to", "megatron", "--no-verify") == 0
    assert convert(run, back, "--to", "hf", "--no-verify") == 0
    assert "no tokenizer" not in capsys.readouterr().err
    config = json.loads((back / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (0, 1)
    for name in ["tokenizer.json", *FILES]:
        assert (back / name).read_bytes() == (hf / name).read_bytes()
