"""Command `selectron prepare --executor ray` on a real Ray of one machine, which the first call starts itself."""

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


TWICE = """
import sys
from pathlib import Path
from megatron_ext.cli import main
output, broken, mended, *arguments = sys.argv[1:]
print(main(arguments), Path(output).exists())
Path(mended).rename(broken)
print(main(arguments))
"""
"""Program that calls a command, repairs a file and calls the command again: one Ray serves both calls."""


def call_twice(source: Path, output: Path, tokenizer: Path, broken: Path, mended: Path) -> tuple[list[str], list[str]]:
    """Run `selectron prepare` with the options of `prep_fakes.options`. Return the lines of both its outputs."""
    data = ["--input", str(source), "--output", str(output), "--tokenizer", str(tokenizer), "--tasks", "2"]
    domains = ["--train-domains", "C4,CommonCrawl", "--test-domains", "ArXiv"]
    sizes = ["--validation-fraction", "0.2", "--shard-tokens", "700"]
    arguments = ["prepare", *data, *domains, *sizes, *NO_FILTERS, "--executor", "ray", "--workers", "2"]
    command = [sys.executable, "-c", TWICE, str(output), str(broken), str(mended), *arguments]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    return done.stdout.splitlines(), done.stderr.splitlines()


def test_failed_task_on_ray_and_resumption(records, tmp_path, tokenizer_file):
    broken, mended = records / "b.jsonl", tmp_path / "b.jsonl"
    mended.write_text(broken.read_text())
    with broken.open("a") as file:
        file.write("{broken\n")
    out, errors = call_twice(records, tmp_path / "ray", tokenizer_file, broken, mended)
    assert [line for line in out if line[:1].isdigit()] == ["2 False", "0"], "\n".join(errors[-40:])
    (why,) = [line for line in errors if line.startswith("selectron: error: ")]
    assert re.search(r"b\.jsonl:46: not JSON .*; repair it or pass --on-error skip$", why)
    prepare(options(records, tmp_path / "local", tokenizer_file, tasks=2, filtering=UNFILTERED))
    local, on_ray = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "local", tmp_path / "ray")
    )
    assert local == on_ray
