"""Non-finite gradients on one rank with every optimizer: retry, skip, rollback, and abort."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import covering
import pytest
import sabotage
import whole_run
from corpora import prepared
from launching import curve, records, write_config
from pool import WorkerFailed

pytestmark = pytest.mark.slow

STEPS = 7
FIELDS = ["training.evaluate_every=0", "model.pattern=top1_chunk,attention", f"training.steps={STEPS}"]
EMBEDDING = "embedding.word_embeddings.weight"
"""Parameter whose gradient `sabotage` corrupts, the first of the model."""
# Every other test uses `megatron`, and UNCLIPPED is ZeRO-2.
SHARDINGS = covering.cases(every=["none", "megatron", "zero1", "zero2", "zero3"], default=["none", "zero1", "zero3"])
UNCLIPPED = "zero2_unclipped"
"""ZeRO-2 with a DeepSpeed file that asks for no gradient norm, which the verdict on a step needs all the same."""


class Runs:
    """Runs of one configuration in two processes."""

    def __init__(self, pool: Any, folder: Path) -> None:
        self._pool, self.folder = pool, folder
        self._config = write_config(folder, prepared(folder), folder)

    def undisturbed(self, sharding: str) -> Path:
        """Return the folder of an undisturbed run, made once."""
        folder = self.folder / sharding
        if not folder.exists():
            self._pool.run(whole_run.run, 2, self._config, [*FIELDS, *_of(sharding), f"run.name={sharding}"])
        return folder

    def broken(
        self, name: str, overrides: list[str], attempts: list[int], factor: float = math.nan, resume: bool = False
    ) -> Path:
        """Train a run whose second rank's gradient is multiplied by a factor at some attempts."""
        arguments = [*FIELDS, *overrides, f"run.name={name}"]
        self._pool.run(sabotage.run, 2, self._config, arguments, attempts, factor, resume)
        return self.folder / name


def _of(sharding: str) -> list[str]:
    if sharding == UNCLIPPED:
        settings = Path(__file__).with_name("no_grad_norm.json")
        return ["optimizer.sharding=zero2", "optimizer.clip_grad=0", f"optimizer.deepspeed={settings}"]
    return [f"optimizer.sharding={sharding}"]


@pytest.fixture(scope="module")
def runs(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(pool, tmp_path_factory.mktemp("recovery"))


def decisions(folder: Path) -> list[tuple[int, str]]:
    return [(record["step"], record["decision"]) for record in records(folder, "decisions.jsonl")]


def losses(folder: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records(folder)}


def check_retried(retried: Sequence[dict[str, Any]], attempt: int) -> None:
    """Check the two records of a step that was correct when it was computed again."""
    first, second = retried
    assert [(record["step"], record["decision"]) for record in retried] == [(attempt, "again")] * 2
    assert first["line"].startswith("the gradient's norm is not finite")
    assert second["line"].startswith("correct when computed again")
    assert "rank" not in first["line"] + second["line"]  # no diagnosis ran, or it found nothing


def test_successful_retry_without_a_gradient_norm(runs: Runs) -> None:
    folder = runs.broken("again", [*_of(UNCLIPPED)], [4])
    check_retried(records(folder, "decisions.jsonl"), 4)
    assert curve(folder) == curve(runs.undisturbed(UNCLIPPED))


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_retrying_skipping_and_rolling_back(runs: Runs, sharding: str) -> None:
    """Retry step 2. Continue from the parameters after step 3 with step 5's samples, by a skip or from a checkpoint."""
    skip = [*_of(sharding), "resilience.on_nonfinite=skip"]
    skipped = runs.broken(f"skip_{sharding}", skip, [2, 5, 6])
    check_retried(records(skipped, "decisions.jsonl")[:2], 2)
    assert decisions(skipped)[2:] == [(4, "again"), (4, "skip")]
    back = [*_of(sharding), "resilience.on_nonfinite=roll_back", "training.async_checkpoints=true"]
    back += ["training.evaluate_every=3"]  # also at the step of the rollback
    rolled = runs.broken(f"back_{sharding}", back, [4, 5])
    evaluated = [record["step"] for record in records(rolled, "evaluation.jsonl")]
    assert {step: evaluated.count(step) for step in evaluated} == dict.fromkeys((3, 6, 7), evaluated.count(7))
    assert decisions(rolled) == [(4, "again"), (4, "roll_back")]
    assert set(losses(skipped)) == {1, 2, 3, *range(5, STEPS + 1)}
    assert set(losses(rolled)) == set(range(1, STEPS + 1))
    # The repeated attempt names the rank with the faulty gradient, and the parameter.
    rank = f"1 ({socket.gethostname()})"
    for folder in (skipped, rolled):
        again, done = records(folder, "decisions.jsonl")[-2:]
        assert (again["ranks"], again["parameters"]) == ([], [])
        assert (done["ranks"], done["parameters"]) == ([rank], [EMBEDDING])
        assert f"(nan) on rank {rank}, first in the gradient of {EMBEDDING}: " in done["line"]
    assert curve(skipped)[:3] == curve(rolled)[:3]  # only the first has retried step 2
    assert losses(skipped)[5] == losses(rolled)[4]
    undisturbed = losses(runs.undisturbed("megatron"))
    assert [losses(rolled)[step] for step in (1, 2, 3)] == pytest.approx([undisturbed[step] for step in (1, 2, 3)])
    for step in (4, 5):  # other samples or other parameters
        assert losses(rolled)[4] != pytest.approx(undisturbed[step], abs=1e-4)
    assert [record["lr"] for record in records(skipped)][3:] == [record["lr"] for record in records(rolled)][4:]
    # Resuming from a later checkpoint gives the same run, although Adam has counted one update less than steps.
    whole = curve(skipped)
    (skipped / "checkpoints" / "latest").write_text("step_6\n")
    runs.broken(f"skip_{sharding}", skip, [], resume=True)
    assert curve(skipped) == whole


def test_the_run_stops_with_a_checkpoint(runs: Runs) -> None:
    with pytest.raises(WorkerFailed) as caught:
        runs.broken("stop", [], [5, 6])
    where = f"on rank 1 ({socket.gethostname()}), first in the gradient of {EMBEDDING}"
    assert (
        f"resilience.on_nonfinite: in step 5 the gradient's norm is not finite (nan) {where} each time that it was "
        "computed; "
        "set resilience.on_nonfinite to skip or roll_back, or optimizer.lr lower with "
        "run.allow_changed=[optimizer.lr], and add --resume"
    ) in str(caught.value)
    folder = runs.folder / "stop"
    assert (folder / "checkpoints" / "latest").read_text().strip() == "step_4"
    runs.broken("stop", [], [], resume=True)
    assert curve(folder) == curve(runs.undisturbed("megatron"))


def test_rolled_back_run_that_ends_before_its_next_checkpoint(runs: Runs) -> None:
    """A resumed run continues with the samples after the skipped ones."""
    back = ["resilience.on_nonfinite=roll_back", "resilience.retries=0"]
    whole = curve(runs.broken("back", back, [5]))
    with pytest.raises(WorkerFailed, match=r"resilience\.limit: in step 5 .*; 1 steps were skipped or rolled back"):
        runs.broken("back_twice", [*back, "resilience.limit=1"], [5, 7])
    folder = runs.folder / "back_twice"
    (folder / "checkpoints" / "latest").write_text("step_3\n")
    runs.broken("back_twice", back, [], resume=True)
    assert curve(folder) == whole


def test_a_spike(runs: Runs) -> None:
    spike = ["resilience.on_spike=skip", "resilience.spike_window=4", "resilience.retries=0"]
    folder = runs.broken("spike", spike, [6], factor=1e4)
    assert decisions(folder) == [(6, "skip")]
    (record,) = records(folder, "decisions.jsonl")
    assert "the gradient's norm is" in record["line"]
    assert record["grad_norm"] > 10 * max(line["grad_norm"] for line in records(folder))
    ignored = runs.broken("spike_ignored", [], [6], factor=1e4)
    assert decisions(ignored) == []
    assert set(losses(ignored)) == set(range(1, STEPS + 1))


def test_no_checkpoint_to_roll_back_to(runs: Runs) -> None:
    with pytest.raises(WorkerFailed, match="there is no checkpoint yet to roll back to; lower"):
        runs.broken("nothing", ["resilience.on_nonfinite=roll_back", "resilience.retries=0"], [1])
