"""External faults: one line names the file or the field, and nothing is overwritten."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import whole_run
from launching import TP2, call, records, snapshot, write_config
from pool import WorkerFailed, WorkerPool


def one_line(errors: str) -> str:
    """Return the error line of a failed command. There must be exactly one, and no traceback."""
    assert "Traceback" not in errors
    # The error of another rank may follow the first rank's progress bar on the same line.
    lines = re.findall(r"selectron: .*", errors.replace("\r", "\n"))
    assert len(lines) == 1, errors
    assert lines[0].startswith("selectron: error: "), errors
    return lines[0]


def only_line(errors: str) -> str:
    """Return the error line of a command that must have printed nothing else."""
    assert errors.count("\n") == 1, errors
    return one_line(errors)


@pytest.fixture
def config(tmp_path: Path, data: Path) -> Path:
    """Configuration whose run folder, `tmp_path / "run"`, does not exist yet."""
    return write_config(tmp_path, data, tmp_path)


# --- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "field", "said"),
    [
        (["model.pattern=top1_chunks*4"], "model.pattern", "top1_chunks"),
        (["model.num_attention_heads=3", "model.head_dim=8", *TP2], "model.num_attention_heads", "parallel.tensor 2"),
        (["data.seq_length=63", "parallel.context=2"], "data.seq_length", "parallel.context 2"),
        (["parallel.tensor=2", "parallel.pipeline=2"], "parallel", "4 processes per replica"),
        (["model.patern=attention"], "model.patern", "pattern"),
    ],
    ids=["unknown mixer", "heads by tp", "sequence by cp", "processes", "unknown key"],
)
def test_an_impossible_configuration_is_refused_before_anything_starts(
    overrides: list[str], field: str, said: str, tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(tmp_path)
    assert call(config, *overrides, "--processes", "2") == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"selectron: error: {field}: ")
    assert said in line
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "run").exists()


# --- the data --------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("shard", ["train/First/000000.tar", "validation/Second/000000.tar", "test/Other/000001.tar"])
@pytest.mark.parametrize(("damage", "said"), [(truncate, "truncated"), (flip_a_byte, "sha256 differs")])
def test_a_damaged_shard_is_named(
    damage, said: str, shard: str, tmp_path: Path, own_data: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(own_data / shard)
    before = snapshot(tmp_path)
    assert call(config, f"data.path={own_data}") == 2
    line = only_line(capsys.readouterr().err)
    assert str(own_data / shard) in line
    assert said in line
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_damaged_shard_is_named_alike_by_all_ranks(
    pool: WorkerPool, tmp_path: Path, own_data: Path, config: Path
) -> None:
    """`selectron train` prints an error of all ranks once, see tests/launch/test_local.py."""
    shards = sorted((own_data / "train" / "First").glob("*.tar"))
    for shard in shards[:2]:  # ranks verify different shards: each finds one
        flip_a_byte(shard)
    before = snapshot(tmp_path)
    with pytest.raises(WorkerFailed) as caught:
        pool.run(whole_run.run, 2, config, [*TP2, f"data.path={own_data}"])
    found = re.findall(r"UserError: (.*): sha256 differs", str(caught.value))
    assert found == [str(shards[0])] * 2
    assert snapshot(tmp_path) == before


def test_a_damaged_shard_is_skipped_where_that_is_asked_for(
    tmp_path: Path, own_data: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(own_data / "train/First/000000.tar")
    skip = [f"data.path={own_data}", "data.on_damaged=skip"]
    assert call(config, *skip) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("selectron: warning: ")]
    assert str(own_data / "train/First/000000.tar") in said[0]
    assert "the run skips" in said[1]
    (line,) = (tmp_path / "run" / "skipped_shards.jsonl").read_text().splitlines()
    assert '"shard": "train/First/000000.tar"' in line
    flip_a_byte(own_data / "validation/First/000000.tar")  # results depend on validation data
    assert call(config, *skip, "run.name=other") == 2
    assert str(own_data / "validation/First/000000.tar") in one_line(capsys.readouterr().err)


def test_data_of_another_tokenizer_is_refused(
    tmp_path: Path, own_data: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "tokenizer.json"
    other.write_text((own_data / "tokenizer.json").read_text().replace('"ra"', '"ar"', 1) + " ")
    before = snapshot(tmp_path)
    assert call(config, f"data.path={own_data}", f"data.tokenizer={other}") == 2
    assert str(other) in only_line(capsys.readouterr().err)
    shutil.copy(other, own_data / "tokenizer.json")
    assert call(config, f"data.path={own_data}") == 2
    line = only_line(capsys.readouterr().err)
    assert str(own_data / "tokenizer.json") in line
    assert "manifest" in line
    shutil.copy(tmp_path / "config.yaml", own_data / "manifest.json")
    assert call(config, f"data.path={own_data}") == 2
    assert str(own_data / "manifest.json") in only_line(capsys.readouterr().err)
    assert {name for name in snapshot(tmp_path) if name.startswith("run")} == set()
    assert before.keys() == snapshot(tmp_path).keys()


# --- checkpoints -----------------------------------------------------------------------------------------------------


# The learning rate must not depend on the length of the run.
SIX = ["training.steps=6", "optimizer.schedule=constant"]
SEVEN = ["training.steps=7", "optimizer.schedule=constant"]


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Path:
    """Folder of a run with checkpoints after steps 3 and 6. Tests copy it."""
    folder = tmp_path_factory.mktemp("six")
    assert call(write_config(folder, data, folder), *SIX) == 0
    return folder / "run"


@pytest.fixture
def run_folder(tmp_path: Path, six_steps: Path) -> Path:
    return Path(shutil.copytree(six_steps, tmp_path / "run"))


def _unlink(path: Path) -> None:
    path.unlink()


DAMAGES = [
    ("__0_0.distcp", truncate),
    ("__0_0.distcp", flip_a_byte),
    ("__0_1.distcp", _unlink),
    ("common.pt", truncate),
    (".metadata", flip_a_byte),
    ("checkpoint.json", truncate),
    ("checkpoint.json", _unlink),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "damage"), DAMAGES)
def test_a_damaged_checkpoint_that_is_asked_for_is_named_and_the_others_with_it(
    name: str, damage, tmp_path: Path, run_folder: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run_folder / "checkpoints" / "step_6" / name)
    before = snapshot(tmp_path)
    assert call(config, *SEVEN, "--from-step", "6") == 2
    line = only_line(capsys.readouterr().err)
    assert str(run_folder / "checkpoints" / "step_6" / name) in line
    assert "choose another step with --from-step (available: 3)" in line
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_if_all_checkpoints_are_damaged_one_line_says_so(
    tmp_path: Path, run_folder: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_a_byte(run_folder / "checkpoints" / "step_6" / "__0_0.distcp")
    truncate(run_folder / "checkpoints" / "step_3" / "common.pt")
    before = snapshot(tmp_path)
    assert call(config, *SEVEN, "--resume") == 2
    line = only_line(capsys.readouterr().err)
    assert "contains no complete checkpoint" in line
    for name in ("step_6/__0_0.distcp", "step_3/common.pt"):
        assert str(run_folder / "checkpoints" / name) in line
    assert snapshot(tmp_path) == before


@pytest.mark.slow
def test_a_run_whose_newest_checkpoint_is_damaged_continues_from_the_one_before(
    pool: WorkerPool, run_folder: Path, config: Path, six_steps: Path
) -> None:
    damaged = run_folder / "checkpoints" / "step_6" / "__0_0.distcp"
    flip_a_byte(damaged)
    content = damaged.read_bytes()
    errors = pool.run(whole_run.resume, 2, config, SEVEN)
    (warning,) = [line for line in "".join(errors).splitlines() if line.startswith("selectron: warning:")]
    assert str(damaged) in warning
    assert "has checksum" in warning
    assert warning.endswith("continuing from step 3 instead of step 6")
    # Each lost step is recorded once, with the same values as before.
    assert [r["step"] for r in records(run_folder)] == list(range(1, 8))
    assert [r["loss"] for r in records(run_folder)][:6] == pytest.approx(
        [r["loss"] for r in records(six_steps)], abs=1e-5, rel=0
    )
    assert [r["step"] for r in records(run_folder, "evaluation.jsonl")] == [5, 5, 5, 7, 7, 7]
    checkpoints = run_folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_3", "step_6", "step_7"]
    assert damaged.read_bytes() != content  # the checkpoint has been saved again
    assert (checkpoints / "latest").read_text() == "step_7\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.hidden_size=64", "model.hidden_size"),
        ("model.pattern=attention*4", "model.pattern"),
        ("mixers.top1_chunk.chunk_size=8", "mixers.top1_chunk.chunk_size"),
        ("data.seq_length=32", "data.seq_length"),
        ("data.train_domains=[First]", "data.train_domains"),
        ("training.seed=5", "training.seed"),
        ("training.precision=bf16", "training.precision"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_field(
    override: str,
    field: str,
    tmp_path: Path,
    run_folder: Path,
    config: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = snapshot(tmp_path)
    given = [override, "model.head_dim=8", "model.ffn_hidden_size=128", "model.max_position_embeddings=64"]
    assert call(config, *SEVEN, *given, "--resume") == 2
    line = only_line(capsys.readouterr().err)
    assert line.startswith(f"selectron: error: {field}: ")
    assert str(run_folder / "checkpoints" / "step_6") in line
    assert snapshot(tmp_path) == before


# --- the disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """Folder to mount a small disk on. The disk is unmounted at the end."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=False, capture_output=True)


def _mount(folder: Path, size: int, *options: str) -> None:
    option = ",".join([f"size={size}", *options])
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", option, "none", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")


@pytest.mark.slow
def test_a_disk_that_fills_while_saving(
    tmp_path: Path, data: Path, six_steps: Path, mount: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = sum(file.stat().st_size for file in (six_steps / "checkpoints" / "step_3").iterdir())
    _mount(mount, int(1.7 * size))  # room for one checkpoint, not two: the disk fills in the background
    config, checkpoints = write_config(tmp_path, data, mount), mount / "run" / "checkpoints"
    assert call(config, *SIX) == 2
    line = one_line(capsys.readouterr().err)
    assert str(checkpoints / "step_6") in line
    assert "No space left on device" in line
    assert "from step 3" in line
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_3"]
    _mount(mount, 4 * size, "remount")
    assert call(config, *SIX, "--resume") == 0  # leftovers do not prevent a resume
    assert [r["step"] for r in records(mount / "run")] == list(range(1, 7))
    assert [r["loss"] for r in records(mount / "run")] == pytest.approx(
        [r["loss"] for r in records(six_steps)], abs=1e-5, rel=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [4, 5])
def test_a_disk_that_fills_while_recording(
    tmp_path: Path, data: Path, mount: Path, blocks: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk fills when TensorBoard starts its writer thread, or some steps later."""
    _mount(mount, 64 << 10)
    config = write_config(tmp_path, data, mount)
    disk = os.statvfs(mount)
    room = blocks * disk.f_frsize  # for the configuration, the verification record, and one or two blocks more
    (mount / "fill").write_bytes(b"x" * (disk.f_bavail * disk.f_frsize - room))
    assert call(config, "training.steps=3") == 2
    line = one_line(capfd.readouterr().err)
    assert str(mount / "run") in line
    # torch's streams do not report the reason.
    assert "No space left on device" in line or "the disk may be full" in line


@pytest.mark.slow
def test_a_run_folder_that_cannot_be_made(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("kept")
    before = snapshot(tmp_path) | {}
    config = write_config(tmp_path, data, tmp_path / "file")
    assert call(config) == 2
    line = only_line(capsys.readouterr().err)
    assert str(tmp_path / "file") in line
    assert "run.dir" in line
    assert {name: content for name, content in snapshot(tmp_path).items() if name != "config.yaml"} == before
