"""Rules that a configuration must satisfy, checked before a process group starts.

A rule is a function of `Facts`. It returns None, or a problem and its solution. Its docstring gives the reason. Rules
run in order and the first violation is reported, so a rule may rely on earlier ones.
"""

from __future__ import annotations

from megatron_ext.config.derive import derive
from megatron_ext.config.layout import Layout, layout_of
from megatron_ext.config.pattern import parse_pattern
from megatron_ext.config.rules import data, layout, training
from megatron_ext.config.rules.rule import Facts
from megatron_ext.config.schema import RunConfig
from megatron_ext.config.suggest import unknown_mixer
from megatron_ext.config.traits import Mixers
from megatron_ext.utils.errors import UserError

RULES = [*layout.RULES, *data.RULES, *training.RULES]


def check(config: RunConfig, world_size: int, mixer_configs: Mixers) -> Layout:
    """Refuse a configuration that cannot run.

    Args:
        config: the configuration. Derived fields are filled in for the check.
        world_size: processes of the run.
        mixer_configs: the registered mixers, by name.

    Returns:
        The layout of the run.

    Raises:
        UserError: a rule is violated. Reports the first one.
    """
    config = derive(config)
    facts = Facts(
        config=config,
        layout=layout_of(config, world_size),
        layers=parse_pattern(config.model.pattern),
        mixers=mixer_configs,
    )
    for name in facts.layers:
        if name not in mixer_configs:
            raise unknown_mixer("model.pattern", name, mixer_configs)
    for rule in RULES:
        violation = rule.test(facts)
        if violation is not None:
            raise UserError(rule.field, *violation)
    return facts.layout
