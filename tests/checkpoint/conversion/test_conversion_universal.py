"""From a run's checkpoint to DeepSpeed's universal form, into its own engine, and back: the same bits throughout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_runs
import torch

from megatron_ext.cli import main

pytestmark = pytest.mark.slow

State = dict[str, dict[str, torch.Tensor]]
Fixture = Callable[..., Any]

TP2, PP2, TP2_PP2 = {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}
GROUPED = "attention*2"
MIXED = "mamba2,rwkv7,top1_chunk,gated_deltanet"
TIED = {"tie_embeddings": True}

# Layout, processes, and what is trained: pattern, layout, sizes, whose optimizer, precision.
RUNS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "tp2_sp": (2, (MIXED, TP2, {}, "megatron", "fp32")),
    "pp2 zero1": (4, (GROUPED, PP2, {"num_query_groups": 2}, "zero1", "fp32")),
    "tp2_pp2 tied": (4, (GROUPED, TP2_PP2, TIED, "none", "fp32")),
    "zero3 bf16": (2, (GROUPED, {}, {}, "zero3", "bf16")),
}


class Converted:
    """Runs of `RUNS` as universal checkpoints, each made once."""

    def __init__(self, ranks: Any, folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._known: dict[str, tuple[Path, State]] = {}

    def __call__(self, name: str) -> tuple[Path, Path, State]:
        """The run, the universal checkpoint, and the whole state that its ranks held."""
        import universal_runs

        folder = self._folder / name.replace(" ", "_")
        if name not in self._known:
            world_size, case = RUNS[name]
            state = self._ranks.run(universal_runs.save, world_size, folder / "run", *case)[0]
            assert main(["convert", str(folder / "run"), str(folder / "ds"), "--to", "deepspeed-universal"]) == 0
            self._known[name] = (folder, state)
        return folder / "run", folder / "ds", self._known[name][1]


@pytest.fixture(scope="module")
def converted(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(ranks, tmp_path_factory.mktemp("universal"))


def check(found: State, expected: State) -> None:
    assert found.keys() == expected.keys() == {"parameters", "param", "exp_avg", "exp_avg_sq"}
    for kind, tensors in found.items():
        assert tensors.keys() == expected[kind].keys()
        assert [name for name, tensor in tensors.items() if not torch.equal(expected[kind][name], tensor)] == []


@pytest.mark.parametrize(
    ("world_size", "parallel", "stage"),
    [(1, {}, 1), (2, {}, 2), (4, TP2, 1), (2, TP2, 2), (2, {}, 3)],
    ids=["zero1", "zero2 dp2", "zero1 tp2_sp_dp2", "zero2 tp2_sp", "zero3 dp2"],
)
@pytest.mark.parametrize("name", [name for name in RUNS if "bf16" not in name])
def test_deepspeeds_own_loader(
    name: str, world_size: int, parallel: dict[str, Any], stage: int, converted: Converted, ranks: Any
) -> None:
    import universal_runs

    _, folder, expected = converted(name)
    pattern, _, model, *_ = RUNS[name][1]
    answer = ranks.run(universal_runs.load_by_deepspeed, world_size, folder, stage, pattern, parallel, model)
    found, adam_steps, engine_steps = answer[0]
    check(found, expected)
    assert adam_steps == {saved_runs.STEPS}
    assert engine_steps == saved_runs.STEPS
    assert all(float(tensor.abs().max()) > 0 for tensor in found["exp_avg_sq"].values())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_what_came_back(name: str, converted: Converted, ranks: Any, convert: Fixture) -> None:
    import universal_runs

    run, folder, expected = converted(name)
    back = folder.parent / "back"
    assert convert(folder, back, "--to", "megatron") == 0
    world_size, case = RUNS[name]
    state, losses = ranks.run(universal_runs.go_on, world_size, back, *case)[0]
    check(state, expected)
    assert losses == ranks.run(universal_runs.go_on, world_size, run, *case)[0][1]
