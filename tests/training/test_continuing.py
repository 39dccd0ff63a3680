"""Configuration changes at a resume or a branch: permitted ones, and messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from continuing_runs import DATA_RECORD, a_run, identity_of, record_of, text

from megatron_ext.checkpoint.folder import DamagedCheckpoint
from megatron_ext.config.save import save_config
from megatron_ext.training.continuing import Continuation
from megatron_ext.utils.errors import UserError

CHECKPOINT = Path("runs/run/checkpoints/step_6")


def changes(before: dict[str, Any], after: dict[str, Any], *, is_branch: bool = False, **data: Any) -> Any:
    """Result of resuming a run with changed fields from the checkpoint of step 6."""
    config = a_run(after)
    record = record_of(identity_of(a_run(before)))
    return Continuation(config, identity_of(config, **data), is_branch).compare(record, CHECKPOINT)


def test_unchanged_run_prints_nothing() -> None:
    found = changes({}, {})
    assert (found.messages, found.allowed, found.recorded) == ([], [], [])


@pytest.mark.parametrize("is_branch", [False, True], ids=["resume", "branch"])
@pytest.mark.parametrize(
    ("field", "value", "was"),
    [
        ("optimizer.weight_decay", 0.2, "0.1"),
        ("optimizer.betas", [0.9, 0.99], "[0.9, 0.95]"),
        ("optimizer.clip_grad", 0.5, "1.0"),
        ("optimizer.lr", 2e-3, "0.001"),
        ("training.global_batch_size", 8, "4"),
        ("training.fp8", "tensorwise", '"none"'),
        ("training.seed", 2, "1234"),
        ("training.precision", "fp32", '"bf16"'),
        ("data.seq_length", 128, "64"),
        ("data.reset_attention", True, "false"),
        ("data.reset_positions", True, "false"),
        ("data.weights", {"A": 2.0, "B": 1.0}, "null"),
        ("mixers.attention.window", 8, "null"),
        ("model.rotary_base", 1e6, "10000.0"),
        ("training.steps", 20, "10"),
        ("optimizer.schedule", "constant", '"cosine"'),
    ],
)
def test_change_of_past_steps_must_be_allowed_by_field(field: str, value: Any, was: str, is_branch: bool) -> None:
    with pytest.raises(UserError) as raised:
        changes({}, {field: value}, is_branch=is_branch)
    assert raised.value.where == field
    assert f", but the checkpoint {CHECKPOINT} has {was}" in raised.value.problem
    assert f"run.allow_changed=[{field}]" in raised.value.hint
    allowed = changes({}, {field: value, "run.allow_changed": [field]}, is_branch=is_branch)
    assert [(one["step"], one["field"]) for one in allowed.allowed] == [(6, field)]
    assert allowed.recorded == allowed.allowed


@pytest.mark.parametrize("is_branch", [False, True], ids=["resume", "branch"])
@pytest.mark.parametrize(
    ("field", "value"), [("model.hidden_size", 64), ("model.pattern", "attention*3"), ("model.tie_embeddings", True)]
)
def test_another_model_is_never_allowed(field: str, value: Any, is_branch: bool) -> None:
    with pytest.raises(UserError, match=field) as raised:
        changes({}, {field: value, "run.allow_changed": [field]}, is_branch=is_branch)
    assert raised.value.where == field
    assert "allow_changed" not in raised.value.hint


def test_all_rejected_fields_are_named_at_once() -> None:
    with pytest.raises(UserError) as raised:
        changes({}, {"training.seed": 2, "optimizer.weight_decay": 0.3, "training.global_batch_size": 8})
    hint = "run.allow_changed=[training.global_batch_size, training.seed, optimizer.weight_decay]"
    assert hint in raised.value.hint
    assert "and 2 more: training.seed 1234 -> 2, optimizer.weight_decay 0.1 -> 0.3" in raised.value.problem


def test_longer_cosine_names_the_first_other_learning_rate() -> None:
    with pytest.raises(UserError, match=r"the learning rate of step \d+ was [\d.e-]+, and would have been [\d.e-]+"):
        changes({}, {"training.steps": 20})


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"parallel.tensor": 2}, "parallel.tensor 1 -> 2: the losses are not affected"),
        ({}, {"training.evaluate_every": 5}, "training.evaluate_every 0 -> 5: evaluations are affected"),
        ({}, {"resilience.on_spike": "skip"}, 'on_spike "ignore" -> "skip": only later steps are affected'),
        (
            {"optimizer.schedule": "constant"},
            {"optimizer.schedule": "constant", "training.steps": 20},
            "training.steps 10 -> 20: the learning rates of the completed steps are the same",
        ),
        (
            {"optimizer.schedule": "wsd", "optimizer.decay_steps": 2},
            {"optimizer.schedule": "wsd", "optimizer.decay_steps": 4},
            "optimizer.decay_steps 2 -> 4: the learning rates of the completed steps are the same",
        ),
    ],
)
def test_change_of_future_steps_is_reported(before: dict[str, Any], after: dict[str, Any], message: str) -> None:
    found = changes(before, after)
    assert len(found.messages) == 1
    assert "selectron: changed at step 6: " in found.messages[0]
    assert message in found.messages[0]
    assert found.allowed == []


def test_branch_origin_is_not_compared() -> None:
    """A branch that resumes from its own checkpoints does not need the original run."""
    assert changes({"run.branch_from": "runs/trunk/checkpoints/step_4"}, {}).messages == []


def test_equivalent_domains_and_weights_are_not_changes() -> None:
    weights = {"data.weights": {"A": 1.0, "B": 2.0}}
    found = changes(weights, {"data.weights": {"B": 0.2, "A": 0.1}, "data.train_domains": ["A", "B"]})
    assert (found.messages, found.allowed) == ([], [])


# --- data ------------------------------------------------------------------------------------------------------------

OTHER = {**DATA_RECORD, "train": "other", "texts": [text("train", "A", documents=11), *DATA_RECORD["texts"][1:]]}


@pytest.mark.parametrize("is_branch", [False, True], ids=["resume", "branch"])
def test_other_training_text_must_be_allowed(is_branch: bool) -> None:
    with pytest.raises(UserError) as raised:
        changes({}, {}, is_branch=is_branch, record=OTHER)
    assert raised.value.where == "data.path"
    assert f"contains different training text than {CHECKPOINT} was trained on" in raised.value.problem
    assert "A (train) has 11 documents, 100 tokens (previously 10 documents, 100 tokens)" in raised.value.problem
    found = changes({}, {"run.allow_other_data": True}, is_branch=is_branch, record=OTHER)
    assert [one["field"] for one in found.allowed] == ["data"]


def test_same_text_in_another_folder_is_equal() -> None:
    assert changes({}, {"data.path": "s3://elsewhere"}).allowed == []


def test_other_text_under_equal_numbers_and_another_order_of_domains() -> None:
    same = {**OTHER, "texts": [text("train", "A", sha256="f"), *DATA_RECORD["texts"][1:]]}
    with pytest.raises(UserError, match="the same number of documents and tokens, but different shards"):
        changes({}, {}, record=same)
    with pytest.raises(UserError, match="its domains are in a different order"):
        changes({}, {}, record={**DATA_RECORD, "train": "other"})


def test_new_domain_is_attributed_to_the_data() -> None:
    record = {**OTHER, "texts": [*DATA_RECORD["texts"], text("train", "C")]}
    with pytest.raises(UserError, match=r"^data.path: .*C \(train\) is new"):
        changes({}, {}, record=record, train_domains=["A", "B", "C"])


def test_fewer_domains_must_be_allowed() -> None:
    record = {**DATA_RECORD, "train": "fewer", "texts": DATA_RECORD["texts"][:1]}
    only_a = {"data.train_domains": ["A"]}
    with pytest.raises(UserError, match=r"^data.train_domains: "):
        changes({}, only_a, record=record, train_domains=["A"])
    allowed = only_a | {"run.allow_changed": ["data.train_domains"]}
    assert [one["field"] for one in changes({}, allowed, record=record, train_domains=["A"]).allowed] == [
        "data.train_domains"
    ]
    other = {**record, "texts": [text("train", "A", sha256="f")]}
    with pytest.raises(UserError, match=r"^data.path: "):
        changes({}, allowed, record=other, train_domains=["A"])


def test_another_tokenizer_is_never_allowed() -> None:
    with pytest.raises(UserError, match=r"^data.path: .* was prepared with another tokenizer"):
        changes({}, {"run.allow_other_data": True}, tokenizer="b" * 64)


def test_other_evaluation_text_is_reported() -> None:
    record = {**DATA_RECORD, "evaluation": "other", "texts": [*DATA_RECORD["texts"][:2], text("test", "T", tokens=7)]}
    (line,) = changes({}, {}, record=record).messages
    assert "the evaluation text differs" in line
    assert "T (test) has 10 documents, 7 tokens" in line


# --- what came before ------------------------------------------------------------------------------------------------


def test_branch_of_a_changed_trunk_is_rejected() -> None:
    config = a_run({"optimizer.lr": 2e-3})
    changed = [{"step": 3, "field": "optimizer.lr", "before": 1e-3, "after": 2e-3}]
    record = record_of(identity_of(config) | {"changed": changed})
    assert Continuation(config, identity_of(config)).compare(record, CHECKPOINT).recorded == changed
    problem = r"^run.branch_from: .* until step 3, optimizer.lr was 0.001; .*run.allow_changed=\[optimizer.lr\]"
    with pytest.raises(UserError, match=problem):
        Continuation(config, identity_of(config), is_branch=True).compare(record, CHECKPOINT)
    allowing = a_run({"optimizer.lr": 2e-3, "run.allow_changed": ["optimizer.lr"]})
    assert Continuation(allowing, identity_of(allowing), is_branch=True).compare(record, CHECKPOINT).recorded == changed


OLD = {"config", "data", "changed"}
"""Entries missing in checkpoints of earlier versions."""


def test_old_checkpoint_is_compared_by_the_runs_configuration_file(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_6"
    old = {key: value for key, value in identity_of(a_run({})).items() if key not in OLD}
    record = record_of(json.loads(json.dumps(old)))
    save_config(a_run({}), tmp_path / "config.yaml")

    def compared(**fields: Any) -> Any:
        config = a_run({key.replace("__", "."): value for key, value in fields.items()})
        return Continuation(config, identity_of(config)).compare(record, checkpoint)

    (line,) = compared().messages
    assert "does not record its training text" in line
    with pytest.raises(UserError, match=r"^optimizer.weight_decay: 0.5, but the checkpoint .* has 0.1"):
        compared(optimizer__weight_decay=0.5)
    # The run later resumed with another value. The older configuration belongs to the older checkpoint.
    (tmp_path / "config.yaml").rename(tmp_path / "config.until_step_8.yaml")
    save_config(a_run({"optimizer.weight_decay": 0.5}), tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"^optimizer.weight_decay: 0.5, but the checkpoint .* has 0.1"):
        compared(optimizer__weight_decay=0.5)


def test_only_the_record_is_compared_without_a_configuration(tmp_path: Path) -> None:
    old = {key: value for key, value in identity_of(a_run({})).items() if key not in OLD}
    config = a_run({"optimizer.weight_decay": 0.5})
    messages = (
        Continuation(config, identity_of(config)).compare(record_of(old), tmp_path / "checkpoints" / "step_6").messages
    )
    assert any("its run has no configuration file" in line for line in messages)
    config = a_run({"data.reset_attention": True})
    with pytest.raises(UserError, match=r"^data.reset_attention"):
        Continuation(config, identity_of(config)).compare(record_of(old), tmp_path / "checkpoints" / "step_6")


def test_old_configuration_has_the_current_defaults() -> None:
    identity = identity_of(a_run({}))
    fields = {key: value for key, value in identity["config"].items() if key not in ("training.fp8", "run.device")}
    record = record_of(identity | {"config": fields})
    assert Continuation(a_run({}), identity_of(a_run({}))).compare(record, CHECKPOINT).messages == []
    config = a_run({"training.fp8": "tensorwise"})
    with pytest.raises(UserError, match=r"^training.fp8"):
        Continuation(config, identity_of(config)).compare(record, CHECKPOINT)


def test_finished_run_is_compared_without_its_data() -> None:
    config = replace(a_run({"optimizer.weight_decay": 0.5}))
    with pytest.raises(UserError, match=r"^optimizer.weight_decay"):
        Continuation(config, None).compare(record_of(identity_of(a_run({}))), CHECKPOINT)


@pytest.mark.parametrize("fields", [{"data.train_domains": ["b", "A"]}, {"data.weights": {"b": 0.2, "A": 0.1}}])
def test_domains_without_data_are_matched_with_the_checkpoint(fields: dict[str, Any]) -> None:
    before = {key: {"A": 1.0, "B": 2.0} if key == "data.weights" else None for key in fields}
    record = record_of(identity_of(a_run(before)))
    assert Continuation(a_run(fields), None).compare(record, CHECKPOINT).messages == []


@pytest.mark.parametrize(
    "fields", [{"data.train_domains": ["A"]}, {"data.train_domains": ["A", "C"]}, {"data.weights": {"A": 1, "B": 3}}]
)
def test_other_domains_without_data_are_rejected(fields: dict[str, Any]) -> None:
    before = {key: {"A": 1.0, "B": 2.0} if key == "data.weights" else None for key in fields}
    with pytest.raises(UserError, match=rf"^{next(iter(fields))}: "):
        Continuation(a_run(fields), None).compare(record_of(identity_of(a_run(before))), CHECKPOINT)


def test_unknown_field_of_another_version_is_reported() -> None:
    identity = identity_of(a_run({}))
    record = record_of(identity | {"config": identity["config"] | {"optimizer.new": 3}})
    (line,) = Continuation(a_run({}), identity).compare(record, CHECKPOINT).messages
    assert "This version does not have optimizer.new, and did not compare it" in line


@pytest.mark.parametrize(
    "entries",
    [
        {"config": 3},
        {"data": {"train": "text"}},
        {"data": DATA_RECORD | {"texts": 5}},
        {"changed": None},
        {"changed": [1]},
        {"data.tokenizer": 3},
        {"data.train_domains": "A"},
        {"data.weights": [1]},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("is_branch", [False, True], ids=["resume", "branch"])
def test_invalid_identity_is_a_damaged_checkpoint(entries: dict[str, Any], is_branch: bool) -> None:
    identity = identity_of(a_run({}))
    with pytest.raises(DamagedCheckpoint, match=rf"checkpoint.json: entry {next(iter(entries))} of its identity"):
        Continuation(a_run({}), identity, is_branch).compare(record_of(identity | entries), CHECKPOINT)
