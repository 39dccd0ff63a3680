"""Conversion from a run's checkpoint to DeepSpeed's universal format, into its engine, and back: bit-identical."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import saved_runs
import torch
from covering import cases

from megatron_ext.cli import main
from megatron_ext.config.save import to_yaml
from megatron_ext.conversion.deepspeed import universal
from megatron_ext.conversion.megatron.torch_dist import TorchDistTensors
from megatron_ext.mixers.core.registry import load_all
from megatron_ext.utils.errors import UserError

pytestmark = pytest.mark.slow

State = dict[str, dict[str, torch.Tensor]]
Fixture = Callable[..., Any]

TP2, PP2, TP2_PP2 = {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}
GROUPED = "attention*2"
MIXED = "mamba2,rwkv7"
TIED = {"tie_embeddings": True}

# Number of processes, and the run: pattern, layout, sizes, optimizer, precision.
RUNS: dict[str, tuple[int, tuple[Any, ...]]] = {
    "tp2_sp": (2, (MIXED, TP2, {}, "megatron", "fp32")),
    "pp2 zero1": (4, (GROUPED, PP2, {"num_query_groups": 2}, "zero1", "fp32")),
    "tp2_pp2 tied": (4, (GROUPED, TP2_PP2, TIED, "none", "fp32")),
    "zero3 bf16": (2, (GROUPED, {}, {}, "zero3", "bf16")),
}


class Converted:
    """Universal checkpoints of the runs in `RUNS`. Each is converted once."""

    def __init__(self, pool: Any, folder: Path) -> None:
        self._pool, self._folder = pool, folder
        self._states: dict[str, State] = {}
        self.later_losses: dict[str, list[float]] = {}

    def __call__(self, name: str) -> tuple[Path, Path, State]:
        """Return the run, the universal checkpoint, and the state of the whole run.

        Afterwards `later_losses` contains the losses of the run's steps after its checkpoint.
        """
        import universal_runs

        folder = self._folder / name.replace(" ", "_")
        if name not in self._states:
            world_size, case = RUNS[name]
            state, losses = self._pool.run(universal_runs.save, world_size, folder / "run", *case)[0]
            assert main(["convert", str(folder / "run"), str(folder / "ds"), "--to", "deepspeed-universal"]) == 0
            self._states[name], self.later_losses[name] = state, losses
        return folder / "run", folder / "ds", self._states[name]


@pytest.fixture(scope="module")
def converted(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(pool, tmp_path_factory.mktemp("universal"))


def check(found: State, expected: State) -> None:
    assert found.keys() == expected.keys() == {"parameters", "param", "exp_avg", "exp_avg_sq"}
    for kind, tensors in found.items():
        assert tensors.keys() == expected[kind].keys() != set()
        assert [name for name, tensor in tensors.items() if not torch.equal(expected[kind][name], tensor)] == []


# Number of processes, layout and ZeRO stage of an engine.
ENGINES: dict[str, tuple[int, dict[str, Any], int]] = {
    "zero1": (1, {}, 1),
    "zero1 tp2_sp_dp2": (4, TP2, 1),
    "zero2 tp2_sp": (2, TP2, 2),
    "zero3 dp2": (2, {}, 3),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    # Tensor parallelism cuts query groups differently. A tied weight is one file for two weights.
    cases(
        every=[(name, engine) for name in ("tp2_sp", "pp2 zero1", "tp2_pp2 tied") for engine in ENGINES],
        default=[
            ("tp2_sp", "zero1"),
            ("tp2_sp", "zero2 tp2_sp"),
            ("pp2 zero1", "zero1 tp2_sp_dp2"),
            ("tp2_pp2 tied", "zero3 dp2"),
        ],
    ),
)
def test_deepspeeds_own_loader(name: str, engine: str, converted: Converted, pool: Any) -> None:
    import universal_runs

    world_size, parallel, stage = ENGINES[engine]
    _, folder, expected = converted(name)
    pattern, _, model, *_ = RUNS[name][1]
    answer = pool.run(universal_runs.load_by_deepspeed, world_size, folder, stage, pattern, parallel, model)
    found, adam_steps, engine_steps = answer[0]
    check(found, expected)
    assert adam_steps == {saved_runs.STEPS}
    assert engine_steps == saved_runs.STEPS
    assert all(float(tensor.abs().max()) > 0 for tensor in found["exp_avg_sq"].values())


@pytest.mark.parametrize("name", RUNS)
def test_a_run_resumes_after_conversion_there_and_back(
    name: str, converted: Converted, pool: Any, convert: Fixture
) -> None:
    import universal_runs

    _, folder, expected = converted(name)
    back = folder.parent / "back"
    assert convert(folder, back, "--to", "megatron") == 0
    world_size, case = RUNS[name]
    state, losses = pool.run(universal_runs.resume, world_size, back, *case)[0]
    check(state, expected)
    assert losses == converted.later_losses[name]


@pytest.mark.parametrize(
    ("pattern", "model"),
    [
        (",".join(sorted(load_all())), {}),
        ("rwkv7,attention", {"block": "rwkv7", "normalization": "layer_norm"}),
        ("mamba,attention", {"block": "mixer"}),
    ],
    ids=["transformer", "rwkv7", "mixer"],
)
def test_tensor_parallel_splits_match_the_parity_tests(pattern: str, model: dict[str, Any]) -> None:
    """Tensor-parallel metadata of every mixer agrees with the table of the parity tests."""
    import parity

    from megatron_ext.conversion.core.our_model import Split, splits
    from megatron_ext.conversion.core.saved_model import saved_model

    config = saved_runs.run_config(pattern, {}, model, {})
    found = splits(saved_model(saved_runs.identity_of(config), "a test"))
    assert len(found) > 10
    gated = model.get("block", "transformer") == "transformer"
    for key, split in found.items():
        parts = 2 if gated and key.endswith("linear_fc1.weight") else 1
        assert split == Split(parity._split_dimension(key), parts), key


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (3, 2)], ids=["zero1", "zero3 dp2"])
def test_checkpoints_written_by_deepspeed_convert(
    stage: int,
    world_size: int,
    converted: Converted,
    pool: Any,
    convert: Fixture,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Load a run's checkpoint into an engine, save it there, and convert it with DeepSpeed's converter."""
    import universal_runs

    case = RUNS["pp2 zero1"][1]
    pattern, _, model, *_ = case
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    ours = converted("pp2 zero1")[1]
    parameters = pool.run(universal_runs.save_by_deepspeed, world_size, ours, theirs, stage, pattern, model)[0]
    capsys.readouterr()
    assert convert(theirs, back, "--to", "megatron") == 2
    assert "universal: contains no selectron.json, and DeepSpeed's files do not contain the model's " in error(capsys)
    (tmp_path / "model.yaml").write_text(to_yaml(universal_runs.config_of(*case)))
    assert convert(theirs, back, "--to", "megatron", "--model-config", tmp_path / "model.yaml") == 0
    assert "the optimizer state has a format that is not supported and is not converted" in capsys.readouterr().err
    found = TorchDistTensors(back / "checkpoints" / "step_0")
    assert found.infos().keys() == parameters.keys()
    assert [key for key, tensor in parameters.items() if not torch.equal(found.read(key), tensor)] == []


def error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("selectron: error: ")
    return line


def inspected(capsys: pytest.CaptureFixture[str], path: Path) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["inspect", str(path), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect(converted: Converted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run, folder, _ = converted("zero3 bf16")
    facts, run_facts = inspected(capsys, folder), inspected(capsys, run)
    assert (facts["format"], facts["architecture"]) == ("deepspeed_universal", "Selectron")
    same = ["step", "tokens", "pattern", "vocab_size", "parameters", "dtype", "optimizer_state", "to"]
    assert {key: facts[key] for key in same} == {key: run_facts[key] for key in same}
    assert facts["to"] == {"hf": None, "megatron": None, "deepspeed-universal": None}
    assert inspected(capsys, folder / "global_step2")["bytes"] == 2 * run_facts["bytes"]  # fp32 instead of bf16


def test_a_model_without_optimizer_state(
    converted: Converted, pool: Any, convert: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSpeed starts with zero moments. The conversion back recognizes that there is no optimizer state."""
    import universal_runs

    run, _, expected = converted("pp2 zero1")
    hf, folder, back = tmp_path / "hf", tmp_path / "ds", tmp_path / "back"
    assert convert(run, hf, "--to", "hf", "--no-verify") == 0
    capsys.readouterr()
    assert convert(hf, folder, "--to", "deepspeed-universal") == 0
    message = capsys.readouterr().err
    assert "the source has no optimizer state of Selectron: DeepSpeed starts with zero moments at step 0" in message
    moment = folder / "global_step0" / "zero" / "embedding.word_embeddings.weight" / "exp_avg.pt"
    assert moment.stat().st_size < 10_000 < saved_runs.VOCABULARY * 64 * 4
    pattern, _, model, *_ = RUNS["pp2 zero1"][1]
    for stage in (1, 3):
        answer = pool.run(universal_runs.load_by_deepspeed, 2, folder, stage, pattern, {}, model)
        found, steps, _ = answer[0]
        assert steps == {0}
        assert all(not tensor.any() for kind in ("exp_avg", "exp_avg_sq") for tensor in found[kind].values())
        for name, tensor in found["parameters"].items():
            before = expected["parameters"][name]
            if "word_embeddings" in name or "output_layer" in name:
                assert not tensor[saved_runs.VOCABULARY :].any()  # the Hugging Face model has no padding
                tensor, before = tensor[: saved_runs.VOCABULARY], before[: saved_runs.VOCABULARY]
            assert torch.equal(tensor, before), name
    assert not inspected(capsys, folder)["optimizer_state"]
    assert convert(folder, back, "--to", "hf", "--no-verify") == 0
    assert (back / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


def test_optimizer_state_is_converted_if_the_dtype_is_unchanged(
    converted: Converted, convert: Fixture, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder, _ = converted("tp2_pp2 tied")
    capsys.readouterr()
    assert convert(run, tmp_path / "same", "--to", "megatron") == 0
    assert "verified: every tensor and the optimizer state; logits" in capsys.readouterr().err
    assert convert(folder, tmp_path / "bf16", "--to", "megatron", "--dtype", "bf16", "--no-verify") == 0
    assert "the optimizer state does not fit another --dtype and is not converted" in capsys.readouterr().err
    assert inspected(capsys, tmp_path / "same")["optimizer_state"]
    assert not inspected(capsys, tmp_path / "bf16")["optimizer_state"]
    assert convert(run, tmp_path / "fp32", "--to", "deepspeed-universal", "--dtype", "fp32") == 2
    assert "--dtype: float32 has no effect" in error(capsys)


def test_wrong_optimizer_state_is_found(
    converted: Converted,
    convert: Fixture,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron_ext.conversion.deepspeed import universal_writing

    _, folder, _ = converted("tp2_pp2 tied")
    monkeypatch.setattr(universal_writing, "MOMENTS", ("exp_avg", "exp_avg"))
    capsys.readouterr()
    assert convert(folder, tmp_path / "again", "--to", "deepspeed-universal") == 2
    assert "does not contain the tensors of its configuration: lacks exp_avg_sq." in error(capsys)
    monkeypatch.setattr(universal_writing, "MOMENTS", ("exp_avg", "exp_avg_sq"))
    monkeypatch.setattr(universal_writing, "_own_storage", lambda tensor: tensor + 1 if tensor.dim() == 1 else tensor)
    assert convert(folder, tmp_path / "again", "--to", "deepspeed-universal") == 2
    assert "differs from the converted tensor" in error(capsys)
    assert not list(tmp_path.iterdir())


def _half_a_file(folder: Path) -> str:
    path = folder / "global_step2" / "zero" / "decoder.final_layernorm.weight" / "fp32.pt"
    path.write_bytes(path.read_bytes()[:-100])
    return "fp32.pt: differs from what was written, so the checkpoint is damaged; "


def _no_moment(folder: Path) -> str:
    (folder / "global_step2" / "zero" / "decoder.final_layernorm.weight" / "exp_avg.pt").unlink()
    return "exp_avg.pt: is missing, so the checkpoint is damaged; "


def _no_tag(folder: Path) -> str:
    (folder / "latest_universal").write_text("global_step7")
    return "latest_universal: names 'global_step7', but "


def _no_description(folder: Path) -> str:
    path = folder / "global_step2" / "selectron.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtypes": {"weight": "load"}}))
    return "selectron.json: is not a description of a checkpoint ("


@pytest.mark.parametrize("damage", [_half_a_file, _no_moment, _no_tag, _no_description])
def test_damage(
    damage: Callable[[Path], str],
    converted: Converted,
    convert: Fixture,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(converted("tp2_pp2 tied")[1], copy)
    message = damage(copy)
    capsys.readouterr()
    assert convert(copy, tmp_path / "hf", "--to", "hf") == 2
    assert message in error(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]


class Harmful:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('harm is done')",)


def test_checkpoint_files_run_no_code(tmp_path: Path) -> None:
    """Only DeepSpeed's class for sub-parameters is accepted."""
    from deepspeed.checkpoint import SubparamShape

    shape = SubparamShape(patterns=["a"], shape=((2, 2), 3), partition_dim=0)
    tensor = torch.arange(12.0).view(4, 3)
    torch.save({"param": tensor, "sub_param_shape": shape}, tmp_path / "fp32.pt")
    assert torch.equal(universal._tensor(tmp_path / "fp32.pt"), tensor)
    torch.save({"param": tensor, "more": Harmful()}, tmp_path / "fp32.pt")
    with pytest.raises(UserError, match=r"fp32.pt: cannot be read: it names __builtin__.exec, which is not allowed "):
        universal._tensor(tmp_path / "fp32.pt")
