"""Command `selectron convert`: options, errors, output, and removal of partial results."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from failed_conversions import Convert, edited, error, refused

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--to", "onnx"], "argument --to: invalid choice: 'onnx'"),
        ([], "the following arguments are required: --to"),
        (["--to", "deepspeed-universal", "--dtype", "bf16"], "--dtype: bfloat16 has no effect, because universal "),
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
    run_copy: Path,
    convert: Convert,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    line: str,
) -> None:
    assert convert(run_copy, tmp_path / "out", *arguments) == 2
    assert error(capsys).startswith(line)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_replaced(
    run_copy: Path, hf: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert convert(run_copy, hf, "--to", "hf") == 2
    assert "hf already exists; give another folder, or add --overwrite" in error(capsys)
    assert convert(hf, hf / "in it", "--to", "megatron", "--overwrite") == 2
    assert "contain each other" in error(capsys)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(b"")
    assert convert(run_copy, tmp_path / "photos", "--to", "hf", "--overwrite") == 2
    assert "photos contains one.png, which no conversion writes and overwriting would remove; " in error(capsys)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "vocab.txt").write_text("a")
    assert convert(run_copy, tmp_path / "other", "--to", "hf", "--overwrite") == 2
    assert "other contains no model to overwrite" in error(capsys)
    (tmp_path / "file").write_text("a")
    assert convert(run_copy, tmp_path / "file", "--to", "hf", "--overwrite") == 2
    assert "file is a file, not a model to overwrite" in error(capsys)
    edited(hf, architectures=["BertForMaskedLM"])
    assert convert(hf, tmp_path / "photos", "--to", "hf") == 2
    (hf / "metrics.jsonl").write_text("")  # a file of a training run
    assert convert(run_copy, hf, "--to", "hf", "--overwrite") == 2
    (hf / "metrics.jsonl").unlink()
    assert convert(run_copy, hf, "--to", "hf", "--overwrite", "--no-verify") == 0
    assert json.loads((hf / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "hf", "other", "photos"]


def test_a_destination_given_by_a_link_or_a_dot(
    run_copy: Path, hf: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(hf)
    assert convert(run_copy, tmp_path / "link", "--to", "hf", "--overwrite", "--no-verify") == 0
    assert (tmp_path / "link").is_symlink()
    assert (hf / "model.safetensors").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert convert(run_copy, ".", "--to", "megatron", "--overwrite", "--no-verify") == 0
    assert (tmp_path / "here" / "checkpoints" / "latest").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "hf", "link"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT], ids=str)
def test_an_interrupted_conversion_leaves_no_files(
    run_copy: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
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
    assert convert(run_copy, tmp_path / "deep" / "er" / "hf", "--to", "hf") == 128 + number
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(number) is before


def test_the_old_model_is_restored_if_the_new_one_cannot_be_renamed(
    run_copy: Path, hf: Path, convert: Convert, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def renamed(path: Path, to: Path) -> Path:
        if path.name == ".hf.partial":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return rename(path, to)

    before = {path.name: path.read_bytes() for path in hf.iterdir()}
    monkeypatch.setattr(Path, "rename", renamed)
    assert convert(run_copy, hf, "--to", "hf", "--overwrite", "--no-verify") == 2
    assert {path.name: path.read_bytes() for path in hf.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_redundant_model_config_is_refused(
    hf: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(convert, capsys, hf, tmp_path, "--model-config", "model.yaml")
    assert message == f"--model-config: {hf}/config.json already describes the model; remove it"


def test_a_dry_run_prints_sizes_and_writes_nothing(
    run_copy: Path, convert: Convert, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(run_copy, tmp_path / "out", "--to", "hf", "--dry-run", "--shard-size", "0.0003") == 0
    assert not list(tmp_path.iterdir())
    message = capsys.readouterr().out
    assert convert(run_copy, tmp_path / "out", "--to", "hf", "--shard-size", "0.0003", "--no-verify") == 0
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert f"{path}  {path.stat().st_size / 1e6:,.1f} MB" in message


def test_wrong_bits_are_found(
    run_copy: Path,
    convert: Convert,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_ext.conversion.huggingface.families import tensors

    split, interleave = tensors.split_rows, tensors.interleave_rows
    # Corrupt the first matrix of the feed-forward, which has one head group.
    monkeypatch.setattr(
        tensors,
        "interleave_rows",
        lambda parts, head_groups: parts[0].repeat(2, 1) if head_groups == 1 else interleave(parts, head_groups),
    )
    assert convert(run_copy, tmp_path / "hf", "--to", "hf") == 2
    assert "mlp.linear_fc1.weight differs from the converted tensor" in error(capsys)
    # A fault that a round trip hides shows in the logits.
    order = {1: -1}
    monkeypatch.setattr(
        tensors,
        "split_rows",
        lambda x, head_groups, widths: split(x, head_groups, widths)[:: order.get(head_groups, 1)],
    )
    monkeypatch.setattr(
        tensors,
        "interleave_rows",
        lambda parts, head_groups: interleave(parts[:: order.get(head_groups, 1)], head_groups),
    )
    assert convert(run_copy, tmp_path / "hf", "--to", "hf") == 2
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
    run_copy: Path,
    convert: Convert,
    small_disk: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    size: str,
) -> None:
    assert convert(run_copy, small_disk / "out", "--to", to) == 2
    assert f"needs {size} MB, but " in error(capsys)
    # Another process may fill the disk after the check.
    from megatron_ext.commands import convert as command

    monkeypatch.setattr(command, "check_space", lambda *_: None)
    assert convert(run_copy, small_disk / "out", "--to", to) == 2
    assert f"{small_disk}/out: cannot be written: No space left on device; free disk space" in error(capsys)
    assert not list(small_disk.iterdir())
