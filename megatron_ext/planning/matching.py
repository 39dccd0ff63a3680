"""Feed-forward width at which a model has as many parameters as a reference model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm

from megatron_ext.config.schema import RunConfig
from megatron_ext.config.sweep_file import WIDTH, MatchParameters
from megatron_ext.utils.errors import UserError

CountParameters = Callable[[RunConfig], int]


def matched_width(
    config: RunConfig, reference: str, target: int, match: MatchParameters, count_parameters: CountParameters
) -> int:
    """Return the feed-forward width at which a model's parameters come closest to a target.

    The number of parameters is linear in the width, so two counts determine the width. The result is then verified.

    Args:
        config: whole configuration of the run.
        reference: name of the reference run.
        target: parameters of the reference run.
        match: tolerance and granularity of the match.
        count_parameters: function that counts the parameters of a configuration.

    Raises:
        UserError: the model has no feed-forward, or misses the target by more than `match.within`.
    """
    multiple = lcm(match.multiple_of, config.parallel.tensor)
    first, second = (count_parameters(set_ffn_width(config, n * multiple)) for n in (1, 2))
    if first == second:
        problem = f"a layer of model.block {config.model.block} has no feed-forward whose width could match parameters"
        raise UserError("match_parameters", problem, "choose another model.block, or list the run under `runs`")
    width = max(1, 1 + round((target - first) / (second - first))) * multiple
    num_parameters = count_parameters(set_ffn_width(config, width))
    if abs(num_parameters - target) > match.within * target:
        problem = f"{num_parameters:,} parameters, with {WIDTH}={width}, are nearest to the {target:,} of {reference}"
        # With the narrowest feed-forward, the mixer alone may have too many parameters.
        smaller = "make the mixer smaller" if width == multiple else "give a smaller match_parameters.multiple_of"
        hint = f"{smaller}, or a match_parameters.within above {match.within:g}"
        raise UserError("match_parameters", f"{problem}, {abs(num_parameters - target) / target:.2%} away", hint)
    return width


def set_ffn_width(config: RunConfig, width: int) -> RunConfig:
    """Return the configuration with feed-forward width `width`."""
    return replace(config, model=replace(config.model, ffn_hidden_size=width))
