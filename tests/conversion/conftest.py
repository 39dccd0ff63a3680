from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _modules_in_a_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make transformers copy the code of models to a temporary folder, from which it imports them.

    All conversion tests of a process share the folder, because Python imports the package of the copies only once.
    """
    try:
        import transformers.dynamic_module_utils as loader
    except ImportError:
        yield
        return
    before = loader.HF_MODULES_CACHE
    loader.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    loader.HF_MODULES_CACHE = before


@pytest.fixture(scope="session")
def saved_run(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function that returns the folder of a run trained briefly under a layout. Each run is trained once."""
    import saved_runs

    folders: dict[str, Path] = {}

    def make(
        pattern: str,
        parallel: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        mixers: dict[str, Any] | None = None,
        precision: str = "fp32",
    ) -> Path:
        case = (pattern, parallel or {}, model or {}, mixers or {}, precision)
        if repr(case) not in folders:
            folders[repr(case)] = tmp_path_factory.mktemp("saved") / "run"
            world_size = case[1].get("tensor", 1) * case[1].get("pipeline", 1)
            pool.run(saved_runs.save, world_size, folders[repr(case)], *case)
        return folders[repr(case)]

    return make


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Function that runs `selectron convert` in this process and returns the exit code."""
    from megatron_ext.cli import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # set by the command, so restored by the fixture

    def run(*arguments: object) -> int:
        try:
            return main(["convert", *map(str, arguments)])
        except SystemExit as stop:
            return int(stop.code or 0)

    return run


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], torch.nn.Module]]:
    """Function that builds a config.json's model in its own library, on the CPU and without compilation."""
    import transformers

    def build(config: dict[str, Any]) -> torch.nn.Module:
        (architecture,) = config["architectures"]
        if hasattr(transformers, architecture):
            cls = getattr(transformers, architecture)
        else:
            pytest.importorskip("fla", reason="flash-linear-attention is not installed")
            from beside_fla import IN_MODELS, PLAIN, fla, replace

            replace(monkeypatch, PLAIN | IN_MODELS)
            cls = fla(f"models.{architecture}")
        return cls(cls.config_class.from_dict(dict(config))).eval()

    with torch.compiler.set_stance("force_eager"):
        yield build


@pytest.fixture(scope="module")
def run_copy(saved_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Separate copy of a run, because some tests damage it."""
    folder = tmp_path_factory.mktemp("command") / "run"
    shutil.copytree(saved_run("attention*2", {"tensor": 2}), folder)
    return folder


@pytest.fixture
def hf(run_copy: Path, convert: Callable[..., int], tmp_path: Path) -> Path:
    """Model of the run in Hugging Face's format, in two files."""
    folder = tmp_path / "hf"
    assert convert(run_copy, folder, "--to", "hf", "--no-verify", "--shard-size", "0.0003") == 0
    assert len(list(folder.glob("*.safetensors"))) == 2
    return folder
