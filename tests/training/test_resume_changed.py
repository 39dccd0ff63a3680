"""Command `selectron train` on runs that exist, do not exist, or have another configuration."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from launching import call, records, snapshot

from data_prep.prepare import PrepareOptions, prepare
from megatron_ext.training.loop import TrainingLoop

CONFIG = """
data: {{path: {data}, seq_length: 64}}
model: {{pattern: attention, hidden_size: 32, num_attention_heads: 4}}
training: {{steps: 4, global_batch_size: 2, micro_batch_size: 2, precision: fp32, checkpoint_every: 2,
            keep_checkpoints: 0, evaluate_every: 2, evaluation_sequences: 2}}
optimizer: {{lr: 1e-3, min_lr: 1e-4, warmup_steps: 1}}
run: {{dir: {runs}, name: run, device: cpu}}
"""


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run, with its configuration beside it. Tests must not write to it."""
    runs = tmp_path_factory.mktemp("finished")
    (runs / "config.yaml").write_text(CONFIG.format(data=data, runs=runs))
    assert call(runs / "config.yaml", "--resume=auto") == 0  # no checkpoint, so the run starts from scratch
    return runs / "run"


@pytest.fixture
def run(finished: Path, data: Path, tmp_path: Path) -> Path:
    """Copy of the finished run, with a matching configuration beside it."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "config.yaml").write_text(CONFIG.format(data=data, runs=tmp_path))
    return tmp_path / "run"


def resumed(run: Path, *arguments: str, how: str = "--resume") -> int:
    return call(run.parent / "config.yaml", how, *arguments)


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err


def test_identity_of_the_training_text_is_in_every_record(finished: Path) -> None:
    record = json.loads((finished / "checkpoints" / "step_2" / "checkpoint.json").read_text())["identity"]
    about = json.loads((finished / "model.json").read_text())
    assert about["data"] == record["data"]
    assert {text["split"] for text in about["data"]["texts"]} == {"train", "validation", "test"}
    assert about["changed"] == record["changed"] == []
    assert {line["data"] for line in records(finished)} == {about["data"]["train"][:16]}
    assert {line["data"] for line in records(finished, "evaluation.jsonl")} == {about["data"]["evaluation"][:16]}


def test_missing_run_is_not_resumed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resumed(run, "run.name=runn") == 2
    place = run.parent / "runn"
    assert printed(capsys) == (
        f"selectron: error: --resume: {place} contains no checkpoint to resume from; did you mean run.name=run? "
        "--resume=auto starts a new run if there is none\n"
    )
    assert not place.exists()


def test_run_without_a_checkpoint_restarts_with_auto(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run / "checkpoints")
    assert resumed(run) == 2
    assert "use --resume=auto to start the run from the beginning" in printed(capsys)
    assert call(run.parent / "config.yaml") == 2
    assert "already contains a run without a checkpoint; add --resume=auto to start it" in printed(capsys)
    assert resumed(run, how="--resume=auto") == 0
    assert [line["step"] for line in records(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "problem"),
    [
        ("model.hidden_size=64", "model.hidden_size: 64, but the checkpoint"),
        ("optimizer.weight_decay=0.3", "optimizer.weight_decay: 0.3, but the checkpoint"),
        ("data.seq_length=32", "data.seq_length: 32, but the checkpoint"),
        ("training.steps=3", "training.steps: 3, but the checkpoint"),
        ("training.steps=8", "training.steps: 8, but the checkpoint"),
    ],
)
def test_finished_run_is_compared(run: Path, field: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert resumed(run, field) == 2
    assert printed(capsys).startswith(f"selectron: error: {problem} {run}/checkpoints/step_4 has ")


def test_harmless_change_of_a_finished_run_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resumed(run, "training.micro_batch_size=1") == 0
    changed, finished = printed(capsys).splitlines()
    assert "changed at step 4: training.micro_batch_size 2 -> 1: the losses are not affected" in changed
    assert finished == f"{run} is finished: step 4 of 4"


def test_longer_cosine_must_be_allowed_by_name_and_is_recorded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(run)
    assert resumed(run, "training.steps=6", "run.allow_changed=[training.steps]") == 0
    assert "continued with training.steps 6, previously 4 (run.allow_changed)" in printed(capsys)
    assert records(run)[:4] == before
    assert [line["step"] for line in records(run)] == [1, 2, 3, 4, 5, 6]
    (decision,) = records(run, "decisions.jsonl")
    assert (decision["step"], decision["decision"], decision["field"]) == (4, "changed", "training.steps")
    assert "allow_changed: []" in (run / "config.yaml").read_text()
    changed = [{"step": 4, "field": "training.steps", "before": 4, "after": 6}]
    assert json.loads((run / "model.json").read_text())["changed"] == changed
    assert resumed(run, "training.steps=6") == 0  # the run has changed already, so no permission is needed
    record = json.loads((run / "checkpoints" / "step_6" / "checkpoint.json").read_text())
    assert record["identity"]["changed"] == changed


def test_run_continued_from_an_earlier_step_and_killed_resumes_there(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint of step 4 still exists, and the records of steps 3 and 4 are from the new attempt."""
    with monkeypatch.context() as killed:
        killed.setattr(TrainingLoop, "_save", Mock(side_effect=KeyboardInterrupt))
        assert call(run.parent / "config.yaml", "--from-step", "2") == 130
    assert (run / "checkpoints" / "step_4").is_dir()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    capsys.readouterr()
    assert resumed(run) == 0
    assert "from step 2 to step 4" in printed(capsys)
    assert [line["step"] for line in records(run)] == [1, 2, 3, 4]


def test_branch_copies_decisions_up_to_its_checkpoint(run: Path) -> None:
    decided = [
        {"time": "t", "step": 2, "decision": "roll_back", "line": "before it", "to_step": 1, "samples": 4},
        {"time": "t", "step": 2, "decision": "skip", "line": "before it"},
        {"time": "t", "step": 2, "decision": "changed", "line": "after it", "field": "optimizer.lr"},
        {"time": "t", "step": 3, "decision": "again", "line": "after it"},
        {"time": "t", "step": 4, "decision": "roll_back", "line": "after it", "to_step": 2, "samples": 8},
    ]
    (run / "decisions.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in decided))
    skipped = {"step": 0, "tokens": 9, "samples_an_epoch": 1, "of_samples": 2, "shards": [{"shard": "a"}]}
    later = skipped | {"step": 3, "shards": []}
    (run / "skipped_shards.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in (skipped, later)))
    step = f"run.branch_from={run}/checkpoints/step_2"
    assert call(run.parent / "config.yaml", "run.name=branch", step) == 0
    assert records(run.parent / "branch", "decisions.jsonl") == decided[:2]
    first, whole = records(run.parent / "branch", "skipped_shards.jsonl")
    assert first == skipped
    assert (whole["step"], whole["shards"]) == (2, [])


@pytest.mark.parametrize("change", ["one more", "others"])
def test_other_documents_under_the_same_names(
    run: Path, data: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The data is prepared again, with one more document or with the same number of other documents."""
    lines = (data.parent / "raw.jsonl").read_text().splitlines()
    if change == "one more":
        lines.append(lines[0].replace("ka", "lo"))
    else:
        lines[0] = lines[0].replace("ka", "lo")
    again = prepared_again(tmp_path, data, lines)
    (run / "checkpoints" / "latest").write_text("step_2\n")
    before = snapshot(run)
    assert resumed(run, f"data.path={again}") == 2
    error = printed(capsys)
    assert error.startswith(
        f"selectron: error: data.path: {again} contains different training text than {run}/checkpoints/step_2"
    )
    assert "First (train) has " in error
    assert "Second" not in error
    assert "run.allow_other_data=true to continue with this data" in error
    assert snapshot(run) == before
    assert resumed(run, f"data.path={again}", "run.allow_other_data=true") == 0
    assert "step 2: continued with different training text (run.allow_other_data): First (train)" in printed(capsys)
    (decision,) = records(run, "decisions.jsonl")
    assert (decision["step"], decision["field"]) == (2, "data")
    assert [line["data"] == records(run)[0]["data"] for line in records(run)] == [True, True, False, False]
    assert "allow_other_data: false" in (run / "config.yaml").read_text()


def test_the_same_documents_in_another_folder(run: Path, data: Path, tmp_path: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_2\n")
    before = records(run)
    shutil.copytree(data, tmp_path / "moved")
    assert resumed(run, f"data.path={tmp_path / 'moved'}") == 0
    assert [line["loss"] for line in records(run)] == [line["loss"] for line in before]
    assert not (run / "decisions.jsonl").exists()


def prepared_again(folder: Path, data: Path, lines: list[str]) -> Path:
    """Prepare the corpus of `data` with other documents and the same tokenizer."""
    (folder / "again").mkdir()
    raw = folder / "again" / "raw.jsonl"  # the shards contain the file's name
    raw.write_text("".join(f"{line}\n" for line in lines))
    prepare(
        PrepareOptions(
            input=str(raw),
            output=str(folder / "again" / "data"),
            train_domains=["First", "Second"],
            test_domains=["Other"],
            tokenizer=str(data / "tokenizer.json"),
            validation_fraction=0.2,
            shard_tokens=1500,
            progress=False,
        )
    )
    return folder / "again" / "data"
