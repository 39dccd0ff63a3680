from __future__ import annotations

import pytest
import torch

from megatron_ext.parallel.parameters import generator_for, normal, ones


def test_random_stream_is_reproducible() -> None:
    """Golden values: a change would alter the initial weights of all existing configurations."""
    generator = generator_for(1234, "decoder.layers.3.mlp.linear_fc1.weight")
    assert generator.initial_seed() == GOLDEN_SEED
    assert torch.randint(0, 2**31, (4,), generator=generator).tolist() == GOLDEN_DRAWS


GOLDEN_SEED = 6863604854436928844
GOLDEN_DRAWS = [925106998, 985376073, 916906559, 2027396606]


def test_random_streams_differ() -> None:
    identities = [(1, "a"), (2, "a"), (1, "b"), (1, "a", 0), ("1", "a"), (12, 3), (1, 23)]
    assert len({generator_for(*identity).initial_seed() for identity in identities}) == len(identities)


@pytest.mark.parametrize("std", [0.02, 3.0])
def test_normal_and_ones_fill_parameter(std: float) -> None:
    whole = torch.empty(200, 100)
    normal(std)(whole, generator_for(1))
    assert float(whole.std()) == pytest.approx(std, rel=0.02)
    assert abs(float(whole.mean())) < 0.03 * std
    ones(whole, generator_for(1))
    assert whole.unique().tolist() == [1.0]
