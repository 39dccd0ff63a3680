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
from megatron_ext.training.continuing import Continuing
from megatron_ext.utils.errors import UserError

CHECKPOINT = Path("runs/run/checkpoints/step_6")


def changes(before: dict[str, Any], after: dict[str, Any], *, is_branch: bool = False, **data: Any) -> Any:
    """Result of resuming a run with changed fields from the checkpoint of step 6."""
    config = a_run(after)
    record = record_of(identity_of(a_run(before)))
    return Continuing(config, identity_of(config, **data), is_branch).compare(record, CHECKPOINT)


def test_an_equal_run_says_nothing() -> None:
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
def test_the_past_is_refused_by_the_name_of_the_field_and_allowed_by_it(
    field: str, value: Any, was: str, is_branch: bool
) -> None:
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


def test_all_refused_fields_are_named_at_once() -> None:
    with pytest.raises(UserError) as raised:
        changes({}, {"training.seed": 2, "optimizer.weight_decay": 0.3, "training.global_batch_size": 8})
    hint = "run.allow_changed=[training.global_batch_size, training.seed, optimizer.weight_decay]"
    assert hint in raised.value.hint
    assert "and 2 more: training.seed 1234 -> 2, optimizer.weight_decay 0.1 -> 0.3" in raised.value.problem


def test_a_longer_cosine_says_which_rates_would_have_been_others() -> None:
    with pytest.raises(UserError, match=r"the learning rate of step \d+ was [\d.e-]+, and would have been [\d.e-]+"):
        changes({}, {"training.steps": 20})


@pytest.mark.parametrize(
    ("before", "after", "said"),
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
def test_what_leaves_the_past_alone_is_said(before: dict[str, Any], after: dict[str, Any], said: str) -> None:
    found = changes(before, after)
    assert len(found.messages) == 1
    assert "selectron: changed at step 6: " in found.messages[0]
    assert said in found.messages[0]
    assert found.allowed == []


def test_what_a_run_was_begun_from_is_not_compared() -> None:
    """A branch that resumes from its own checkpoints does not need the original run."""
    assert changes({"run.branch_from": "runs/trunk/checkpoints/step_4"}, {}).messages == []


def test_domains_and_weights_that_mean_the_same_are_no_change() -> None:
    weights = {"data.weights": {"A": 1.0, "B": 2.0}}
    found = changes(weights, {"data.weights": {"B": 0.2, "A": 0.1}, "data.train_domains": ["A", "B"]})
    assert (found.messages, found.allowed) == ([], [])


# --- data ------------------------------------------------------------------------------------------------------------

OTHER = {**DATA_RECORD, "train": "other", "texts": [text("train", "A", documents=11), *DATA_RECORD["texts"][1:]]}


@pytest.mark.parametrize("is_branch", [False, True], ids=["resume", "branch"])
def test_other_training_text_is_refused_and_allowed_by_name(is_branch: bool) -> None:
    with pytest.raises(UserError) as raised:
        changes({}, {}, is_branch=is_branch, record=OTHER)
    assert raised.value.where == "data.path"
    assert f"contains different training text than {CHECKPOINT} was trained on" in raised.value.problem
    assert "A (train) has 11 documents, 100 tokens (previously 10 documents, 100 tokens)" in raised.value.problem
    found = changes({}, {"run.allow_other_data": True}, is_branch=is_branch, record=OTHER)
    assert [one["field"] for one in found.allowed] == ["data"]


def test_the_same_text_elsewhere_is_the_same() -> None:
    assert changes({}, {"data.path": "s3://elsewhere"}).allowed == []


def test_other_text_under_equal_numbers_and_another_order_of_domains() -> None:
    same = {**OTHER, "texts": [text("train", "A", sha256="f"), *DATA_RECORD["texts"][1:]]}
    with pytest.raises(UserError, match="the same number of documents and tokens, but different shards"):
        changes({}, {}, record=same)
    with pytest.raises(UserError, match="its domains are in a different order"):
        changes({}, {}, record={**DATA_RECORD, "train": "other"})


def test_a_new_domain_in_the_folder_is_blamed_on_the_data() -> None:
    record = {**OTHER, "texts": [*DATA_RECORD["texts"], text("train", "C")]}
    with pytest.raises(UserError, match=r"^data.path: .*C \(train\) is new"):
        changes({}, {}, record=record, train_domains=["A", "B", "C"])


def test_fewer_domains_are_the_users_own_change() -> None:
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


def test_other_text_to_evaluate_on_is_said() -> None:
    record = {**DATA_RECORD, "evaluation": "other", "texts": [*DATA_RECORD["texts"][:2], text("test", "T", tokens=7)]}
    (line,) = changes({}, {}, record=record).messages
    assert "the evaluation text differs" in line
    assert "T (test) has 10 documents, 7 tokens" in line


# --- what came before ------------------------------------------------------------------------------------------------


def test_a_branch_of_a_run_that_was_changed_on_its_way_is_refused() -> None:
    config = a_run({"optimizer.lr": 2e-3})
    changed = [{"step": 3, "field": "optimizer.lr", "before": 1e-3, "after": 2e-3}]
    record = record_of(identity_of(config) | {"changed": changed})
    assert Continuing(config, identity_of(config)).compare(record, CHECKPOINT).recorded == changed
    problem = r"^run.branch_from: .* until step 3, optimizer.lr was 0.001; .*run.allow_changed=\[optimizer.lr\]"
    with pytest.raises(UserError, match=problem):
        Continuing(config, identity_of(config), is_branch=True).compare(record, CHECKPOINT)
    allowing = a_run({"optimizer.lr": 2e-3, "run.allow_changed": ["optimizer.lr"]})
    assert Continuing(allowing, identity_of(allowing), is_branch=True).compare(record, CHECKPOINT).recorded == changed


OLD = {"config", "data", "changed"}
"""Entries missing in checkpoints of earlier versions."""


def test_a_checkpoint_of_an_earlier_version_is_compared_with_the_configuration_beside_it(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step_6"
    old = {key: value for key, value in identity_of(a_run({})).items() if key not in OLD}
    record = record_of(json.loads(json.dumps(old)))
    save_config(a_run({}), tmp_path / "config.yaml")

    def compared(**fields: Any) -> Any:
        config = a_run({key.replace("__", "."): value for key, value in fields.items()})
        return Continuing(config, identity_of(config)).compare(record, checkpoint)

    (line,) = compared().messages
    assert "does not record its training text" in line
    with pytest.raises(UserError, match=r"^optimizer.weight_decay: 0.5, but the checkpoint .* has 0.1"):
        compared(optimizer__weight_decay=0.5)
    # The run later resumed with another value. The older configuration belongs to the older checkpoint.
    (tmp_path / "config.yaml").rename(tmp_path / "config.until_step_8.yaml")
    save_config(a_run({"optimizer.weight_decay": 0.5}), tmp_path / "config.yaml")
    with pytest.raises(UserError, match=r"^optimizer.weight_decay: 0.5, but the checkpoint .* has 0.1"):
        compared(optimizer__weight_decay=0.5)


def test_without_any_configuration_only_the_record_is_compared(tmp_path: Path) -> None:
    old = {key: value for key, value in identity_of(a_run({})).items() if key not in OLD}
    config = a_run({"optimizer.weight_decay": 0.5})
    said = Continuing(config, identity_of(config)).compare(record_of(old), tmp_path / "checkpoints" / "step_6").messages
    assert any("its run has no configuration file" in line for line in said)
    config = a_run({"data.reset_attention": True})
    with pytest.raises(UserError, match=r"^data.reset_attention"):
        Continuing(config, identity_of(config)).compare(record_of(old), tmp_path / "checkpoints" / "step_6")


def test_a_schema_of_before_has_todays_defaults() -> None:
    identity = identity_of(a_run({}))
    fields = {key: value for key, value in identity["config"].items() if key not in ("training.fp8", "run.device")}
    record = record_of(identity | {"config": fields})
    assert Continuing(a_run({}), identity_of(a_run({}))).compare(record, CHECKPOINT).messages == []
    config = a_run({"training.fp8": "tensorwise"})
    with pytest.raises(UserError, match=r"^training.fp8"):
        Continuing(config, identity_of(config)).compare(record, CHECKPOINT)


def test_a_finished_run_is_compared_without_its_data() -> None:
    config = replace(a_run({"optimizer.weight_decay": 0.5}))
    with pytest.raises(UserError, match=r"^optimizer.weight_decay"):
        Continuing(config, None).compare(record_of(identity_of(a_run({}))), CHECKPOINT)


@pytest.mark.parametrize("fields", [{"data.train_domains": ["b", "A"]}, {"data.weights": {"b": 0.2, "A": 0.1}}])
def test_without_its_data_domains_are_known_by_the_checkpoints_names(fields: dict[str, Any]) -> None:
    before = {key: {"A": 1.0, "B": 2.0} if key == "data.weights" else None for key in fields}
    record = record_of(identity_of(a_run(before)))
    assert Continuing(a_run(fields), None).compare(record, CHECKPOINT).messages == []


@pytest.mark.parametrize(
    "fields", [{"data.train_domains": ["A"]}, {"data.train_domains": ["A", "C"]}, {"data.weights": {"A": 1, "B": 3}}]
)
def test_without_its_data_other_domains_are_refused(fields: dict[str, Any]) -> None:
    before = {key: {"A": 1.0, "B": 2.0} if key == "data.weights" else None for key in fields}
    with pytest.raises(UserError, match=rf"^{next(iter(fields))}: "):
        Continuing(a_run(fields), None).compare(record_of(identity_of(a_run(before))), CHECKPOINT)


def test_a_field_that_only_another_version_has_is_said() -> None:
    identity = identity_of(a_run({}))
    record = record_of(identity | {"config": identity["config"] | {"optimizer.new": 3}})
    (line,) = Continuing(a_run({}), identity).compare(record, CHECKPOINT).messages
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
def test_what_no_training_writes_is_a_damaged_checkpoint(entries: dict[str, Any], is_branch: bool) -> None:
    identity = identity_of(a_run({}))
    with pytest.raises(DamagedCheckpoint, match=rf"checkpoint.json: entry {next(iter(entries))} of its identity"):
        Continuing(a_run({}), identity, is_branch).compare(record_of(identity | entries), CHECKPOINT)
