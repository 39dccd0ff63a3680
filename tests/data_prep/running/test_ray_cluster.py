"""`selectron prepare --executor ray` on a real Ray, which it starts for itself on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prep_fakes import options

from data_prep.prepare import prepare
from data_prep.stages import Filtering

pytestmark = pytest.mark.slow

ONE_PASS = ["--no-clean", "--duplicates", "keep", "--decontaminate", "off"]
"""One stage: each takes seconds to begin on Ray, whatever there is to do."""


TWO_CALLS = """
import sys
from pathlib import Path
from megatron_ext.cli import main
file, whole, *arguments = sys.argv[1:]
first = main(arguments)
print(first, Path(arguments[arguments.index("--output") + 1]).exists(), flush=True)
Path(file).write_text(Path(whole).read_text())
print(main(arguments))
"""
"""Calls of one process share its Ray, which takes longer to begin than they to run. A file is mended in between."""


def call_twice(source: Path, output: Path, tokenizer: Path, whole: Path) -> subprocess.CompletedProcess[str]:
    """`selectron prepare` with the options of `prep_fakes.options`, before and after b.jsonl is as `whole`."""
    data = ["--input", str(source), "--output", str(output), "--tokenizer", str(tokenizer), "--tasks", "2"]
    domains = ["--train-domains", "C4,CommonCrawl", "--test-domains", "ArXiv"]
    sizes = ["--validation-fraction", "0.2", "--shard-tokens", "700"]
    arguments = ["prepare", *data, *domains, *sizes, *ONE_PASS, "--executor", "ray", "--workers", "2"]
    command = [sys.executable, "-c", TWO_CALLS, str(source / "b.jsonl"), str(whole), *arguments]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)


def test_a_failed_task_is_the_calls_error_and_the_next_call_ends_in_the_bytes_of_one_machine(
    records, tmp_path, tokenizer_file
):
    whole = tmp_path / "whole.jsonl"
    whole.write_bytes((records / "b.jsonl").read_bytes())
    with (records / "b.jsonl").open("a") as file:
        file.write("{broken\n")
    done = call_twice(records, tmp_path / "ray", tokenizer_file, whole)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("selectron: error: ")]
    assert len(said) == 1, done.stderr
    assert re.search(r"b\.jsonl:46: not JSON .*; repair it or pass --on-error skip$", said[0])
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("2 False", "0"), done.stdout

    one_pass = Filtering(cleaning=None, duplicates="keep", overlap=None)
    prepare(options(records, tmp_path / "local", tokenizer_file, tasks=2, filtering=one_pass))
    here, there = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "local", tmp_path / "ray")
    )
    assert here == there
