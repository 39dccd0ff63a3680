"""Command `selectron prepare --executor ray` on a real Ray of one machine, which each call starts itself."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from prep_fakes import UNFILTERED, options

from data_prep.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")]

NO_FILTERS = ["--no-clean", "--duplicates", "keep", "--decontaminate", "off"]
"""Options with which a single stage remains, because every stage takes seconds to start on Ray."""


def call(source: Path, output: Path, tokenizer: Path) -> subprocess.CompletedProcess[str]:
    """Run `selectron prepare` with the options of `prep_fakes.options`."""
    data = ["--input", str(source), "--output", str(output), "--tokenizer", str(tokenizer), "--tasks", "2"]
    domains = ["--train-domains", "C4,CommonCrawl", "--test-domains", "ArXiv"]
    sizes = ["--validation-fraction", "0.2", "--shard-tokens", "700"]
    arguments = [*data, *domains, *sizes, *NO_FILTERS, "--executor", "ray", "--workers", "2"]
    command = [sys.executable, "-m", "megatron_ext.cli", "prepare", *arguments]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)


def test_failed_task_on_ray_and_resumption(records, tmp_path, tokenizer_file):
    whole = (records / "b.jsonl").read_text()
    (records / "b.jsonl").write_text(whole + "{broken\n")
    failed = call(records, tmp_path / "ray", tokenizer_file)
    assert failed.returncode == 2, failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert re.search(r"^selectron: error: .*b\.jsonl:46: not JSON .*; repair it or pass --on-error skip$", last)
    assert not (tmp_path / "ray").exists()

    (records / "b.jsonl").write_text(whole)
    done = call(records, tmp_path / "ray", tokenizer_file)
    assert done.returncode == 0, done.stderr
    prepare(options(records, tmp_path / "local", tokenizer_file, tasks=2, filtering=UNFILTERED))
    local, on_ray = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "local", tmp_path / "ray")
    )
    assert local == on_ray
