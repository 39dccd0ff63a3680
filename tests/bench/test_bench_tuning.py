"""Number of configurations that Triton's autotuner tries."""

from __future__ import annotations

import pytest

from megatron_ext.bench.layers.tuning import evenly_spaced, limit_tuning


@pytest.mark.parametrize(
    ("count", "most", "taken"),
    [(9, 3, [1, 4, 7]), (2, 3, [0, 1]), (3, 3, [0, 1, 2]), (10, 1, [5]), (7, 2, [1, 5]), (0, 2, [])],
)
def test_configurations_are_evenly_spaced(count: int, most: int, taken: list[int]) -> None:
    assert evenly_spaced(range(count), most) == taken


def test_number_of_configurations_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    monkeypatch.setattr(autotuner, "prune_configs", lambda self, kwargs: [*self, kwargs["last"]])
    monkeypatch.setattr(autotuner, "do_bench", None)
    limit_tuning(2)
    assert autotuner.prune_configs(range(7), {"last": 7}) == [2, 6]


def test_configurations_are_timed_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner").Autotuner
    for name in ("prune_configs", "do_bench"):
        monkeypatch.setattr(autotuner, name, None)
    monkeypatch.setattr("triton.testing.do_bench", lambda call, **options: (call(), options))
    limit_tuning(2)
    ran, options = autotuner.do_bench.fget(None)(lambda: "ran", quantiles=(0.5,))
    assert ran == "ran"
    assert options == {"warmup": 5, "rep": 25, "quantiles": (0.5,)}
