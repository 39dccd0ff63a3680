"""Choice of loggers: unknown names and missing packages are refused by name, before anything else happens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.config.effects import Effect, distinguishes_recipes, effect_of
from megatron_ext.config.schema import DataConfig, LoggingConfig, RunConfig
from megatron_ext.config.trial import trial_config
from megatron_ext.training.loggers.core import registry
from megatron_ext.training.loggers.core.base import Logger
from megatron_ext.training.loggers.core.registry import check_loggers, load_all, register
from megatron_ext.utils.errors import UserError


def test_each_module_is_a_logger_without_optional_imports() -> None:
    assert set(load_all()) == {"jsonl", "progress", "tensorboard", "wandb", "mlflow", "trackio"}
    assert [one.name for one in check_loggers(["tensorboard", "jsonl", "tensorboard"])] == ["tensorboard"]


def test_an_unknown_logger_is_refused_with_the_choices() -> None:
    with pytest.raises(UserError) as refused:
        check_loggers(["tensorbord"])
    expected = "logging.backends: no logger 'tensorbord'; choose from: mlflow, tensorboard, trackio, wandb"
    assert str(refused.value) == expected


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_all()
    monkeypatch.setattr(registry, "find_spec", lambda package: None)
    with pytest.raises(UserError) as refused:
        check_loggers([name])
    where = f"logging.backends: {name} needs the package {name}, which is not installed"
    assert str(refused.value) == f"{where}; pip install 'selectron[{name}]'"


def test_a_name_is_registered_once() -> None:
    load_all()
    with pytest.raises(ValueError, match="two loggers are called 'jsonl'"):
        register("jsonl")(Logger)


def test_loggers_do_not_affect_training_or_the_identity_of_a_recipe() -> None:
    assert effect_of("logging.backends") is Effect.NOTHING
    assert not distinguishes_recipes("logging.backends")
    config = RunConfig(data=DataConfig(path="data"))
    assert config.logging.backends == ["tensorboard"]
    tracked = replace(config, logging=LoggingConfig(backends=["wandb", "tensorboard"]))
    assert trial_config(tracked, 5).logging.backends == ["tensorboard"]
