"""Benchmark of data preparation against a bare tokenizer, datatrove and Megatron-LM's preprocess_data."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from data_prep.manifest import load_manifest
from data_prep.tokenization.tokenizer import JsonTokenizer, load_tokenizer
from data_prep.tokenization.vocabularies import end_of_document, token_dtype
from kernels.bench.arguments import print_progress
from megatron_ext.bench.prepare.input import DOMAIN, TEST_DOMAIN, TEST_EVERY, Input, input_texts, write_input
from megatron_ext.bench.prepare.report import PrepareRow
from megatron_ext.bench.supervise import measure_command
from megatron_ext.utils.temp_dirs import scratch_folder

THREADS = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
OURS, DATATROVE, MEGATRON = "selectron prepare", "datatrove DocumentTokenizer", "Megatron-LM preprocess_data"
OURS_DEFAULT = f"{OURS}, default options"
TOKENIZE_ONLY = ("--no-clean", "--duplicates", "keep", "--decontaminate", "off")
"""Options that reduce `selectron prepare` to the work of its peers."""

DOES_MORE = {
    OURS_DEFAULT: "cleans all text, removes exact duplicates and searches training text for test text (one document in "
    f"{TEST_EVERY} is test text), so it reads every file four times"
}
"""Additional work of contestants."""

FLOORS = ("encode_batch", "encode_batch_fast")
FILES_PER_WORKER = 2


@dataclass(frozen=True)
class Task:
    """Task of a contestant.

    Attributes:
        texts: input texts.
        tokenizer: folder with tokenizer.json and the files that transformers needs.
        end: end-of-document token.
        workers: number of processes.
        output: empty folder.
        megatron: checkout of Megatron-LM.
    """

    texts: Input
    tokenizer: Path
    end: str
    workers: int
    output: Path
    megatron: Path | None

    @property
    def tokenizer_file(self) -> Path:
        """Path of tokenizer.json."""
        return self.tokenizer / "tokenizer.json"


@dataclass(frozen=True)
class Run:
    """Measured run of a contestant.

    Attributes:
        seconds: seconds from start to exit.
        cpu_seconds: processor seconds of all processes.
        peak_bytes: resident memory of the largest process; 0: not measured.
        tokens: number of tokens produced; 0: not reported.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int = 0
    tokens: int = 0


def compare(
    texts: Iterator[str], tokenizer: Path, workers: int, rounds: int, disk: Path, megatron: Path | None
) -> list[PrepareRow]:
    """Run all contestants for several rounds, on all texts and on one text per file, and return the medians.

    Args:
        texts: texts to tokenize.
        tokenizer: path of a tokenizer.json.
        workers: number of processes of each contestant.
        rounds: number of rounds.
        disk: folder for inputs and outputs during the benchmark.
        megatron: checkout of Megatron-LM; None: not measured.
    """
    contestants = _contestants(megatron)
    with scratch_folder("prepare", disk) as root:
        files = workers * FILES_PER_WORKER
        full_input = write_input(root / "whole", texts, files)
        start_input = write_input(root / "few", islice(input_texts(full_input.lines), files), files)
        folder, end = _tokenizer_folder(root, tokenizer)
        runs: dict[str, list[tuple[Run, Run]]] = {contestant: [] for contestant in contestants}
        for _ in range(rounds):
            for contestant, run in contestants.items():
                print_progress(contestant)
                first, second = (
                    _run_contestant(run, Task(input_, folder, end, workers, root / "out", megatron))
                    for input_ in (start_input, full_input)
                )
                runs[contestant].append((first, second))
    return [_row(name, pairs, full_input) for name, pairs in runs.items()]


def _contestants(megatron: Path | None) -> dict[str, Callable[[Task], Run]]:
    return {
        **{method: lambda task, method=method: _bare(task, method) for method in FLOORS},  # type: ignore[misc]
        OURS: lambda task: _ours(task, *TOKENIZE_ONLY),
        OURS_DEFAULT: _ours,
        DATATROVE: _datatrove,
        **({MEGATRON: _megatron} if megatron else {}),
    }


def _row(name: str, pairs: list[tuple[Run, Run]], full_input: Input) -> PrepareRow:
    return PrepareRow(
        name=name,
        documents=full_input.documents,
        bytes=full_input.bytes,
        tokens=pairs[0][1].tokens,
        seconds=median(run.seconds for _, run in pairs),
        cpu_seconds=median(run.cpu_seconds for _, run in pairs),
        start_cpu_seconds=median(start_input.cpu_seconds for start_input, _ in pairs) if name not in FLOORS else 0.0,
        peak_bytes=max(run.peak_bytes for _, run in pairs),
        does_more=DOES_MORE.get(name, ""),
    )


def _run_contestant(run: Callable[[Task], Run], task: Task) -> Run:
    task.output.mkdir()
    try:
        return run(task)
    finally:
        shutil.rmtree(task.output)


def _tokenizer_folder(root: Path, tokenizer: Path) -> tuple[Path, str]:
    """Create a tokenizer folder for transformers, and return it with the end-of-document token."""
    folder = root / "tokenizer"
    folder.mkdir()
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    end, _ = end_of_document(JsonTokenizer(load_tokenizer(tokenizer), tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder, end


def _contestant_command(task: Task, name: str, *arguments: Any) -> tuple[list[str], Path]:
    """Return the command that runs a contestant of the module `contestants`, and the path of its result file."""
    result = task.output / "result.json"
    values = [str(task.tokenizer_file), str(task.texts.folder), task.workers, *arguments]
    return [
        sys.executable,
        "-m",
        "megatron_ext.bench.prepare.contestants",
        name,
        str(result),
        json.dumps(values),
    ], result


def _bare(task: Task, method: str) -> Run:
    command, result = _contestant_command(task, "bare", method)
    measure_command(command, THREADS)
    return Run(**json.loads(result.read_text()))


def _datatrove(task: Task) -> Run:
    output = task.output / "tokens"
    command, result = _contestant_command(task, "datatrove", task.end, str(output))
    cost, _ = measure_command(command, THREADS)
    return Run(cost.seconds, cost.cpu_seconds, cost.peak_bytes, json.loads(result.read_text())["tokens"])


def _ours(task: Task, *settings: str) -> Run:
    output = task.output / "data"
    options = {
        "--input": task.texts.folder,
        "--output": output,
        "--train-domains": DOMAIN,
        "--test-domains": TEST_DOMAIN,
        "--tokenizer": task.tokenizer_file,
        "--eos-token": task.end,
        "--validation-fraction": 0,
        "--workers": task.workers,
        "--tasks": task.workers * FILES_PER_WORKER,
    }
    arguments = [str(argument) for pair in options.items() for argument in pair]
    command = [sys.executable, "-m", "megatron_ext.cli", "prepare", *settings, *arguments]
    cost, _ = measure_command(command, THREADS)
    tokens = sum(entry.tokens for entry in load_manifest(output).domains)
    return Run(cost.seconds, cost.cpu_seconds, cost.peak_bytes, tokens)


def _megatron(task: Task) -> Run:
    assert task.megatron is not None
    options = {
        "--input": task.texts.lines,
        "--output-prefix": task.output / "all",
        "--tokenizer-type": "HuggingFaceTokenizer",
        "--tokenizer-model": task.tokenizer,
        "--workers": task.workers,
    }
    arguments = [str(argument) for pair in options.items() for argument in pair]
    program = task.megatron / "tools" / "preprocess_data.py"
    # The program adds its checkout to the path itself. megatron.core may be the installed one.
    cost, output_text = measure_command(
        [sys.executable, str(program), *arguments, "--append-eod"], THREADS | {"HF_HUB_OFFLINE": "1"}
    )
    tokens = task.output / "all_text_document.bin"
    if not tokens.exists():
        raise RuntimeError(output_text)
    width = np.dtype(token_dtype(JsonTokenizer(load_tokenizer(task.tokenizer_file)).vocab_size)).itemsize
    return Run(cost.seconds, cost.cpu_seconds, cost.peak_bytes, tokens.stat().st_size // width)
