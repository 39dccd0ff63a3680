"""Commands `selectron convert` and `selectron inspect`: errors, output, and removal of partial results."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli import main

pytestmark = pytest.mark.slow

Convert = Callable[..., int]


@pytest.fixture(scope="module")
def run(saved_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Separate run, because some of these tests damage it."""
    folder = tmp_path_factory.mktemp("command") / "run"
    shutil.copytree(saved_run("attention*2", {"tensor": 2}), folder)
    return folder


@pytest.fixture
def hf(run: Path, convert: Convert, tmp_path: Path) -> Path:
    """Model of the run in Hugging Face's format, in two files."""
    folder = tmp_path / "hf"
    assert convert(run, folder, "--to", "hf", "--no-verify", "--shard-size", "0.0003") == 0
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder


def error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("selectron: error: ")
    return line.removeprefix("selectron: error: ")


def refused(convert: Convert, capsys: pytest.CaptureFixture[str], source: Path, folder: Path, *more: str) -> str:
    """Return the one error line of a conversion that must fail and leave nothing."""
    before = sorted(folder.iterdir())
    capsys.readouterr()
    assert convert(source, folder / "out", "--to", "megatron", *more) == 2
    assert sorted(folder.iterdir()) == before
    return error(capsys)


def edited(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def _no_shard(folder: Path) -> str:
    (folder / "model-00002-of-00002.safetensors").unlink()
    return "model-00002-of-00002.safetensors: is missing, but model.safetensors.index.json names it; "


def _half_a_shard(folder: Path) -> str:
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "model-00001-of-00002.safetensors: is damaged ("


def _no_index(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text("[]")
    return "model.safetensors.index.json: cannot be read as an index"


def _no_weights(folder: Path) -> str:
    for path in folder.glob("model*"):
        path.unlink()
    return "hf: contains neither model.safetensors nor model.safetensors.index.json; "


def _another_width(folder: Path) -> str:
    edited(folder, intermediate_size=100)
    return "mlp.linear_fc1.weight is [384, 64], its configuration makes it [200, 64]"


def _more_layers(folder: Path) -> str:
    edited(folder, num_hidden_layers=3)
    return "hf: does not contain the tensors of its configuration: lacks model.layers.2.input_layernorm.weight, "


def _fewer_layers(folder: Path) -> str:
    edited(folder, num_hidden_layers=1)
    return "has besides model.layers.1.input_layernorm.weight, "


def _no_number(folder: Path) -> str:
    edited(folder, hidden_size="64")
    return 'config.json: hidden_size: "64" is not a whole number above 0; '


def _no_field(folder: Path) -> str:
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    return "config.json: intermediate_size: missing; "


def _foreign(folder: Path) -> str:
    edited(folder, architectures=["BertForMaskedLM"])
    return "config.json: architecture BertForMaskedLM is not supported; give one of LlamaForCausalLM, "


def _scaled_rotation(folder: Path) -> str:
    edited(folder, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4})
    return 'config.json: rope_parameters.rope_type: "llama3" is not supported; only "default" is supported'


def _biases(folder: Path) -> str:
    edited(folder, attention_bias=True)
    return "config.json: attention_bias: true is not supported; only false is supported"


def _no_heads(folder: Path) -> str:
    edited(folder, num_attention_heads=0)
    return "config.json: num_attention_heads: 0 is not a whole number above 0; "


def _heads_of_no_group(folder: Path) -> str:
    edited(folder, num_key_value_heads=3)
    return "config.json: num_attention_heads: 4 is not divisible by num_key_value_heads 3; "


def _no_rotation(folder: Path) -> str:
    edited(folder, rope_parameters=[1])
    return "config.json: rope_parameters: [1] is not a mapping of fields; "


def _part_of_a_rotation(folder: Path) -> str:
    edited(folder, partial_rotary_factor=0.5)
    return "config.json: partial_rotary_factor: 0.5 is not supported; only 1.0 is supported"


def _no_names(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": 5}}))
    return "model.safetensors.index.json: names 5, which is not text"


def _no_json(folder: Path) -> str:
    (folder / "config.json").write_text("{")
    return "config.json: cannot be read ("


DAMAGES = [
    *(_no_shard, _half_a_shard, _no_index, _no_weights),
    *(_another_width, _more_layers, _fewer_layers, _no_number, _no_field, _no_json),
    *(_foreign, _scaled_rotation, _biases, _no_heads, _heads_of_no_group, _no_rotation, _part_of_a_rotation, _no_names),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.strip("_"))
def test_a_damaged_folder(
    hf: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    said = damage(hf)
    assert said in refused(convert, capsys, hf, tmp_path)


def test_a_damaged_run(run: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shard = next((copy / "checkpoints" / "step_2").glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert f"step_2/{shard.name}: has checksum " in refused(convert, capsys, copy, tmp_path)
    shard.unlink()
    assert f"step_2/{shard.name}: is missing, so the checkpoint is damaged" in refused(convert, capsys, copy, tmp_path)


def test_a_folder_of_something_else(convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert "empty: is no checkpoint: there is no checkpoint.json" in refused(
        convert, capsys, tmp_path / "empty", tmp_path
    )
    assert "none: does not exist; " in refused(convert, capsys, tmp_path / "none", tmp_path)
    (tmp_path / "empty" / "latest").write_text("global_step5")
    (tmp_path / "empty" / "global_step5").mkdir()
    (tmp_path / "empty" / "global_step5" / "mp_rank_00_model_states.pt").write_bytes(b"")
    for folder in (tmp_path / "empty", tmp_path / "empty" / "global_step5"):
        said = refused(convert, capsys, folder, tmp_path)
        assert "is a DeepSpeed checkpoint that only the layout that wrote it can read; convert it" in said


def test_an_older_record_says_what_to_give(
    run: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    record = copy / "checkpoints" / "step_2" / "checkpoint.json"
    content = json.loads(record.read_text())
    del content["identity"]["data.vocab_size"]
    record.write_text(json.dumps(content))
    assert "does not contain data.vocab_size of the model; give the run's config.yaml with --model-config" in refused(
        convert, capsys, copy, tmp_path
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--to", "onnx"], "argument --to: invalid choice: 'onnx'"),
        ([], "the following arguments are required: --to"),
        (["--to", "deepspeed-universal", "--dtype", "bf16"], "--dtype: bfloat16 is for the numbers of a model, and "),
        (
            ["--to", "megatron", "--dtype", "fp16"],
            "--dtype: float16 is not a precision of a run; give one of bf16, fp32",
        ),
        (["--to", "hf", "--shard-size", "0"], "--shard-size: 0 is not above 0; "),
        (["--to", "hf", "--shard-size", "inf"], "--shard-size: inf is not above 0; "),
        (
            ["--to", "megatron", "--shard-size", "2"],
            "--shard-size: 2.0 has no effect with --to megatron; omit the option",
        ),
        (["--to", "megatron", "--architecture", "LlamaForCausalLM"], "--architecture: LlamaForCausalLM has no effect"),
        (
            ["--to", "hf", "--architecture", "MambaForCausalLM"],
            "--architecture: MambaForCausalLM cannot represent the model",
        ),
    ],
)
def test_options(
    run: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert convert(run, tmp_path / "out", *arguments) == 2
    assert error(capsys).startswith(line)
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_kept(
    run: Path, hf: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert convert(run, hf, "--to", "hf") == 2
    assert "hf already exists; give another folder, or add --overwrite" in error(capsys)
    assert convert(hf, hf / "in it", "--to", "megatron", "--overwrite") == 2
    assert "contain each other" in error(capsys)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(b"")
    assert convert(run, tmp_path / "photos", "--to", "hf", "--overwrite") == 2
    assert "photos holds one.png, which no conversion writes, and overwriting would remove it; " in error(capsys)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.txt").write_text("a")
    assert convert(run, tmp_path / "other", "--to", "hf", "--overwrite") == 2
    assert "other contains no model to overwrite" in error(capsys)
    (tmp_path / "file").write_text("a")
    assert convert(run, tmp_path / "file", "--to", "hf", "--overwrite") == 2
    assert "file is a file, not a model to overwrite" in error(capsys)
    edited(hf, architectures=["BertForMaskedLM"])
    assert convert(hf, tmp_path / "photos", "--to", "hf") == 2
    (hf / "metrics.jsonl").write_text("")  # a file of a training run
    assert convert(run, hf, "--to", "hf", "--overwrite") == 2
    (hf / "metrics.jsonl").unlink()
    assert convert(run, hf, "--to", "hf", "--overwrite", "--no-verify") == 0
    assert json.loads((hf / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf", "other", "photos"]


def test_a_destination_by_a_link_and_by_a_dot(
    run: Path, hf: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(hf)
    assert convert(run, tmp_path / "link", "--to", "hf", "--overwrite", "--no-verify") == 0
    assert (tmp_path / "link").is_symlink()
    assert (hf / "model.safetensors").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert convert(run, ".", "--to", "megatron", "--overwrite", "--no-verify") == 0
    assert (tmp_path / "here" / "checkpoints" / "latest").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "hf", "link"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
def test_a_conversion_that_is_ended_leaves_nothing(
    run: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from megatron_ext.conversion.huggingface import folder as hugging_face

    before = signal.getsignal(number)

    def write(tensors: Any, folder: Path, shard_bytes: int) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        try:
            os.kill(os.getpid(), number)
        except BaseException as error:
            raise RuntimeError("[enforce fail at inline_container.cc:858]") from error  # as torch's writer raises it

    monkeypatch.setattr(hugging_face, "write_safetensors", write)
    assert convert(run, tmp_path / "deep" / "er" / "hf", "--to", "hf") == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is before


def test_what_was_there_comes_back_where_the_new_cannot_be_put(
    run: Path, hf: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        if path.name == ".hf.partial":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, to)

    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    monkeypatch.setattr(Path, "rename", renamed)
    assert convert(run, hf, "--to", "hf", "--overwrite", "--no-verify") == 2
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_what_is_said_of_a_model_that_says_it_itself(
    hf: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(convert, capsys, hf, tmp_path, "--model-config", "model.yaml")
    assert said == f"--model-config: {hf}/config.json already describes the model; leave it out"


def test_a_dry_run_says_sizes_and_writes_nothing(
    run: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(run, tmp_path / "out", "--to", "hf", "--dry-run", "--shard-size", "0.0003") == 0
    assert not list(tmp_path.iterdir())
    said = capsys.readouterr().out
    assert convert(run, tmp_path / "out", "--to", "hf", "--shard-size", "0.0003", "--no-verify") == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert f"{path}  {path.stat().st_size / 1e6:,.1f} MB" in said


def test_wrong_bits_are_found(
    run: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_ext.conversion.huggingface.families import tensors

    apart, together = tensors.apart, tensors.together
    # Corrupt the first matrix of the feed-forward, which has one head group.
    monkeypatch.setattr(
        tensors,
        "together",
        lambda parts, head_groups: parts[0].repeat(2, 1) if head_groups == 1 else together(parts, head_groups),
    )
    assert convert(run, tmp_path / "hf", "--to", "hf") == 2
    assert "mlp.linear_fc1.weight differs from the converted tensor" in error(capsys)
    # A fault that a round trip hides shows in the logits.
    order = {1: -1}
    monkeypatch.setattr(
        tensors, "apart", lambda x, head_groups, widths: apart(x, head_groups, widths)[:: order.get(head_groups, 1)]
    )
    monkeypatch.setattr(
        tensors, "together", lambda parts, head_groups: together(parts[:: order.get(head_groups, 1)], head_groups)
    )
    assert convert(run, tmp_path / "hf", "--to", "hf") == 2
    assert f"{tmp_path}/hf: logits differ from those of" in error(capsys)  # not the temporary folder of the check
    assert not list(tmp_path.iterdir())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system of 300 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("no right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("to", "size"), [("hf", "0.6"), ("megatron", "2.5"), ("deepspeed-universal", "1.9")])
def test_a_full_disk(
    run: Path,
    convert: Convert,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    size: str,
) -> None:
    assert convert(run, small_disk / "out", "--to", to) == 2
    assert f"needs {size} MB, but " in error(capsys)
    # Another process may fill the disk after the check.
    from megatron_ext.commands import convert as command

    monkeypatch.setattr(command, "check_space", lambda *_: None)
    assert convert(run, small_disk / "out", "--to", to) == 2
    assert f"{small_disk}/out: cannot be written: No space left on device; free disk space" in error(capsys)
    assert not list(small_disk.iterdir())


def inspected(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect(run: Path, hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ours, theirs = inspected(capsys, run), inspected(capsys, hf, "--tensors")
    alike = {"pattern": "attention*2", "layers": 2, "hidden_size": 64, "vocab_size": 300, "whole": True}
    # Two vocabulary matrices, two norms and four matrices per layer, and the final norm.
    alike["parameters"] = 2 * 300 * 64 + 2 * (2 * 64 + 3 * 64 * 64 + 64 * 64 + 3 * 64 * 192) + 64
    for facts in (ours, theirs):
        assert {key: facts[key] for key in alike} == alike
        assert facts["to"] == {"hf": None, "megatron": None, "deepspeed-universal": None}
    assert (ours["format"], ours["step"], ours["tokens"], ours["optimizer_state"]) == ("selectron", 2, 512, True)
    assert (theirs["format"], theirs["architecture"]) == ("hugging_face", "LlamaForCausalLM")
    assert (theirs["step"], theirs["optimizer_state"]) == (None, False)
    assert theirs["tensors"]["lm_head.weight"] == {"shape": [300, 64], "dtype": "float32"}
    assert main(["inspect", str(run)]) == 0
    assert "attention*2 (2 layers)" in capsys.readouterr().out


def test_inspect_of_what_is_damaged(
    hf: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = _no_shard(hf)
    capsys.readouterr()
    assert main(["inspect", str(hf)]) == 2
    assert said in error(capsys)
    assert main(["inspect", str(hf), "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["whole"] is False
    assert said.split(":")[0] in facts["problem"]
