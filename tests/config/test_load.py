from __future__ import annotations

from pathlib import Path

import pytest
from config_fakes import MIXERS, config_of, load
from ruamel.yaml import YAML

from megatron_ext.config.load import known_keys, load_config, resolve
from megatron_ext.utils.errors import UserError

BASE = "data: {path: d}\n"


def message(text: str, folder: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, folder, *overrides)
    line = str(caught.value).replace(str(folder), "DIR")
    assert "\n" not in line
    return line


def test_defaults_and_derived_fields(tmp_path: Path) -> None:
    config = load(BASE, tmp_path)
    model = config.model
    assert (model.num_query_groups, model.head_dim, model.ffn_hidden_size) == (12, 64, 2048)
    assert model.max_position_embeddings == config.data.seq_length == 2048
    assert config.mixers == {"attention": {"window": None, "temperature": 1.0}}


@pytest.mark.parametrize(("hidden", "ffn"), [(192, 512), (768, 2048), (2052, 5504), (24, 64)])
def test_default_ffn_width(hidden: int, ffn: int) -> None:
    assert config_of(model={"hidden_size": hidden}).model.ffn_hidden_size == ffn


def test_default_ffn_width_of_rwkv7_block() -> None:
    assert config_of(model={"hidden_size": 108, "block": "rwkv7"}).model.ffn_hidden_size == 432


def test_mixer_block_has_no_ffn() -> None:
    config = config_of(model={"block": "mixer"})
    assert config.model.ffn_hidden_size is None
    assert resolve(config, MIXERS) == config


def test_given_fields_are_kept() -> None:
    model = config_of(model={"num_query_groups": 4, "head_dim": 32, "ffn_hidden_size": 100}).model
    assert (model.num_query_groups, model.head_dim, model.ffn_hidden_size) == (4, 32, 100)


def test_resolving_twice_changes_nothing() -> None:
    config = config_of(mixers={"top1_chunk": {"chunk_size": 8}})
    assert resolve(config, MIXERS) == config


def test_hidden_size_must_divide(tmp_path: Path) -> None:
    assert message(BASE, tmp_path, "model.hidden_size=100") == (
        "model.num_attention_heads: model.hidden_size 100 is not divisible by 12 heads; "
        "change one of them, or set model.head_dim"
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("training.steps=200", 200),
        ("optimizer.lr=1e-3", 0.001),
        ("optimizer.lr=1", 1.0),
        ("data.train_domains=[A,B]", ["A", "B"]),
        ("parallel.sequence=true", True),
        ("parallel.sequence=auto", "auto"),
        ("model.num_query_groups=null", 12),
        ("model.pattern=(top1_chunk*3,attention)*4", "(top1_chunk*3,attention)*4"),
        ("mixers.top1_chunk.score=approx", "approx"),
        ("run.name=2026-01-31", "2026-01-31"),
        ("run.name='12'", "12"),
        ("data.path=a=b", "a=b"),
    ],
)
def test_override(tmp_path: Path, override: str, value: object) -> None:
    node: object = load(BASE, tmp_path, override)
    for part in override.partition("=")[0].split("."):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_overlay_file_replaces_only_its_fields(tmp_path: Path) -> None:
    upper = tmp_path / "upper.yaml"
    upper.write_text("training: {steps: 7}\nmixers:\n  top1_chunk: {score: approx}\ndata:\nrun: {name: laid-over}\n")
    text = BASE + "training: {steps: 5, seed: 9}\nmixers:\n  top1_chunk: {chunk_size: 64}\n"
    config = load(text, tmp_path, str(upper))
    assert (config.training.steps, config.training.seed, config.run.name) == (7, 9, "laid-over")
    assert config.mixers["top1_chunk"] == {"chunk_size": 64, "score": "approx"}
    assert config.data == load(text, tmp_path).data
    assert load(text, tmp_path, "training.steps=8", str(upper)).training.steps == 7
    assert load(text, tmp_path, str(upper), "training.steps=8").training.steps == 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such file; give the path of a configuration, see examples/"),
        ("- a list", "is not a mapping of sections; start with a section like `data:`, see examples/"),
        ("training: {stps: 7}", "training.stps: no such field; did you mean steps?"),
        ("training: 7", "training: 7 is not a section of fields; write its fields below it, indented"),
    ],
)
def test_invalid_overlay_file(tmp_path: Path, text: str | None, expected: str) -> None:
    upper = tmp_path / "upper.yml"
    if text is not None:
        upper.write_text(text)
    with pytest.raises(UserError) as caught:
        load(BASE, tmp_path, str(upper))
    assert str(caught.value).removeprefix(f"{upper}: ") == expected


def test_last_override_wins(tmp_path: Path) -> None:
    text = BASE + "training:\nmixers:\n  top1_chunk:\n"
    config = load(text, tmp_path, "training.steps=5", "training.steps=6", "mixers.top1_chunk.chunk_size=7")
    assert config.training.steps == 6
    assert config.mixers["top1_chunk"] == {"chunk_size": 7, "score": "exact"}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("training.stps=1", "training.stps: no such field; did you mean training.steps?"),
        ("steps=1", "steps: no such field; did you mean training.steps?"),
        ("model.lr=1", "model.lr: no such field; did you mean optimizer.lr?"),
        (
            "mixers.top1_chunk.chunk_siz=1",
            "mixers.top1_chunk.chunk_siz: no such field; did you mean mixers.top1_chunk.chunk_size?",
        ),
        ("training=3", "training: is a section, not a field; set one of its fields, e.g. training.steps=..."),
        ("training.steps",
         "training.steps: is not an override; write it like training.steps=200, or give a .yaml file"),
        ("training.steps=1.5",
         "training.steps: 1.5 is not a whole number; give a whole number, without decimal point or exponent"),
        ("training.steps=0", "training.steps: 0 is out of range; give a value greater than 0"),
        ("training.seed=-1", "training.seed: -1 is out of range; give a value of at least 0"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas.1: 1 is out of range; give a value less than 1"),
        ("optimizer.betas=[0.9]", "optimizer.betas: [0.9] has too few entries; give 2 or more"),
        ("optimizer.lr=.nan", "optimizer.lr: NaN is not a finite number; give a finite number"),
        ("optimizer.lr=fast", 'optimizer.lr: "fast" is not a number; give a number, without quotes'),
        ("parallel.sequence=yes", 'parallel.sequence: "yes" is not true, false or auto; write one without quotes'),
        ("parallel.sequence=1", "parallel.sequence: 1 is not true, false or auto; write one without quotes"),
        ("run.name=7", "run.name: 7 is not text; give text; put it in quotes if it looks like a number, true or null"),
        ("data.train_domains=A", 'data.train_domains: "A" is not a list; write it like [a, b]'),
        ("training.precision=fp8", "training.precision: \"fp8\" is not one of the choices; choose 'bf16' or 'fp32'"),
        (
            "mixers.top1_chunk.score=exct",
            "mixers.top1_chunk.score: \"exct\" is not one of the choices; choose 'approx', 'exact' or 'exact_lse'",
        ),
        ("model.pattern=atention*4", "model.pattern: there is no mixer 'atention'; did you mean attention? "
         "known: attention, gated_deltanet, retnet, rwkv6, top1_chunk, top1_element"),
    ],
)  # fmt: skip
def test_bad_override(tmp_path: Path, override: str, expected: str) -> None:
    assert message(BASE, tmp_path, override) == expected


def test_error_of_bad_override_is_one_line(tmp_path: Path) -> None:
    assert message(BASE, tmp_path, "data.path=[a").startswith("data.path: is not valid YAML (")
    assert message(BASE, tmp_path, "run.name=!!binary aGk=").startswith("run: contains a value that is not text")
    assert message(BASE, tmp_path, 'run.name="a\\nb"').startswith("run.name: 'a\\nb' contains the control character")
    assert message(BASE, tmp_path, 'run.name="a b"').startswith('run.name: "a b" has characters')
    assert len(message(BASE, tmp_path, "run.name=" + "/" * 5000)) < 250


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "data.path: missing; write it in the file, or give data.path=... (it has no default)"),
        ("data: {pth: x}", "data.pth: no such field; did you mean path? (and 1 more: data.path)"),
        ("dta: {path: x}", "dta: no such field; did you mean data? (and 1 more: data.path)"),
        ("data: 5", "data: 5 is not a section of fields; write its fields below it, indented"),
        (BASE + "mixers: 5", "mixers: 5 is not a section of fields; write its fields below it, indented"),
        (BASE + "mixers: {moba: {}}", "mixers.moba: there is no mixer 'moba'; "
         "known: attention, gated_deltanet, retnet, rwkv6, top1_chunk, top1_element"),
        (BASE + "mixers: {top1_chunk: {chunk_siz: 3}}",
         "mixers.top1_chunk.chunk_siz: no such field; did you mean chunk_size?"),
        (BASE + "mixers: {top1_chunk: {chunk_size: 0}}",
         "mixers.top1_chunk.chunk_size: 0 is out of range; give a value greater than 0"),
        ("- a\n- b", "DIR/config.yaml: is not a mapping of sections; start with a section like `data:`, see examples/"),
        ("data:\n  path: a\n  path: b\n", "DIR/config.yaml:3: is not valid YAML "
         '(found duplicate key "path" with value "b" (original value: "a")); fix the line'),
        ("data:\n  path: [a\n", "DIR/config.yaml:3: is not valid YAML (expected ',' or ']', but got '<stream end>'); "
         "fix the line"),
    ],
)  # fmt: skip
def test_bad_file(tmp_path: Path, text: str, expected: str) -> None:
    assert message(text, tmp_path) == expected


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (">\n    attention*12\n", "attention*12"),
        ("|\n    (attention,\n     rwkv6)*2,\n    attention\n", "(attention, rwkv6)*2, attention"),
        (">-\r\n    attention,\r\n    rwkv6\r\n", "attention, rwkv6"),
        ('"attention,\\n\\trwkv6"', "attention, rwkv6"),
    ],
)
def test_pattern_with_line_breaks(tmp_path: Path, written: str, read: str) -> None:
    assert load(f"{BASE}model:\n  pattern: {written}", tmp_path).model.pattern == read


@pytest.mark.parametrize("text", ['"attention\\e[2J"', '"attention,\\u2028other"', '"attention\\0"'])
def test_pattern_with_control_characters(tmp_path: Path, text: str) -> None:
    assert "model.pattern: " in message(f"{BASE}model:\n  pattern: {text}", tmp_path)
    assert "contains the control character" in message(f"{BASE}model:\n  pattern: {text}", tmp_path)


def test_several_errors_are_named(tmp_path: Path) -> None:
    text = BASE + "training: {steps: 0, micro_batch_size: a}\noptimizer: {lrr: 1}\n"
    assert message(text, tmp_path) == (
        "optimizer.lrr: no such field; did you mean lr? (and 2 more: training.steps, training.micro_batch_size)"
    )


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "none.yaml", [], MIXERS)
    with pytest.raises(UserError, match="is a folder"):
        load_config(tmp_path, [], MIXERS)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="cannot be read"):
        load_config(tmp_path / "binary.yaml", [], MIXERS)
    with pytest.raises(UserError, match="an alias refers to a value that contains it"):
        load("data: &a {path: *a}", tmp_path)
    with pytest.raises(UserError, match="not valid YAML"):
        load("data: !!python/object:os.system {}", tmp_path)


def test_known_keys_are_settable(tmp_path: Path) -> None:
    """Every key suggested to the user exists in the resolved configuration."""
    config = config_of(mixers={name: {} for name in MIXERS})
    for key in known_keys(MIXERS):
        node: object = config
        for part in key.split("."):
            node = node[part] if isinstance(node, dict) else getattr(node, part)
    assert YAML(typ="safe", pure=True).load("1e-3") == 0.001
