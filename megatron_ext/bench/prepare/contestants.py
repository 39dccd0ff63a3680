"""Contestants of `selectron bench prepare` that run in their own processes: bare tokenizer and datatrove."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.bench.prepare.input import read_texts

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 500_000
"""Batch limits as in `selectron prepare`."""


def bare(tokenizer: str, folder: str, workers: int, method: str) -> dict[str, float]:
    """Encode texts that are already in memory, with the files divided among the workers.

    Args:
        tokenizer: path of a tokenizer.json.
        folder: folder with files `*.jsonl.zst`.
        workers: number of processes, of one thread each.
        method: `encode_batch` or `encode_batch_fast`.

    Returns:
        Seconds of the slowest worker, processor seconds of all workers, and number of tokens.
    """
    paths = sorted(Path(folder).glob("*.jsonl.zst"))
    shares = [(tokenizer, paths[rank::workers], method) for rank in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        results = pool.starmap(_encode, shares, chunksize=1)
    seconds, cpu_seconds, tokens = zip(*results, strict=True)
    return {"seconds": max(seconds), "cpu_seconds": sum(cpu_seconds), "tokens": sum(tokens)}


def _encode(tokenizer: str, paths: list[Path], method: str) -> tuple[float, float, int]:
    from tokenizers import Tokenizer

    encode = getattr(Tokenizer.from_file(tokenizer), method)
    batches = list(_batches(read_texts(paths)))
    tokens, started, cpu_started = 0, time.perf_counter(), time.process_time()
    for batch in batches:
        tokens += sum(map(len, encode(batch, add_special_tokens=False)))
    return time.perf_counter() - started, time.process_time() - cpu_started, tokens


def _batches(texts: list[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        if batch and (len(batch) >= BATCH_DOCUMENTS or characters + len(text) > BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(text)
        characters += len(text)
    yield batch


def datatrove(tokenizer: str, folder: str, workers: int, end: str, output: str) -> dict[str, float]:
    """Tokenize with datatrove's reader and tokenizer, one task per file, without shuffling documents."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    steps = [
        JsonlReader(folder),
        DocumentTokenizer(output, tokenizer, eos_token=end, shuffle_documents=False),
    ]
    tasks = len(list(Path(folder).glob("*.jsonl.zst")))
    LocalPipelineExecutor(steps, tasks, workers, logging_dir=f"{output}/logs").run()
    counts = [int(path.read_text().splitlines()[1]) for path in Path(output).glob("*.metadata")]
    return {"tokens": sum(counts)}


def main() -> None:
    """Run a contestant given as `NAME FILE ARGUMENTS` (ARGUMENTS in JSON), and write its result to FILE."""
    name, target, arguments = sys.argv[1:]
    # The tokenizer library reads these variables when it first runs, and then uses one thread per process.
    os.environ["TOKENIZERS_PARALLELISM"], os.environ["RAYON_NUM_THREADS"] = "false", "1"
    contestant = bare if name == "bare" else datatrove
    result = contestant(*json.loads(arguments))
    Path(target).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
