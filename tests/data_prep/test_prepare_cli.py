import argparse
import os
import subprocess
import sys
import time

import pytest
from prep_fakes import write_jsonl

from data_prep import cli
from data_prep.cleaning import CleaningOptions
from data_prep.contamination.overlap import OverlapOptions
from data_prep.deduplication.duplicates import NearOptions
from data_prep.manifest import load_manifest
from data_prep.stages import Filtering
from megatron_ext.utils.errors import UserError

NO_FILTERS = ["--no-clean", "--duplicates", "keep", "--decontaminate", "off", "--workers", "1"]
"""Options with which a single stage remains and runs in this process, for tests of everything else."""


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(arguments)


def test_runs_and_reports_what_was_skipped(records, tmp_path, tokenizer_file, capsys):
    bad = write_jsonl(records / "bad.jsonl", ["{"])
    out = str(tmp_path / "out")
    domains = ["--train-domains", "c4, RedPajamaCommonCrawl", "--test-domains", "ArXiv,Book"]
    rest = ["--tokenizer", str(tokenizer_file), "--on-error", "skip", "--validation-fraction", "0.3", "--workers", "1"]
    assert cli.run(parse("--input", str(records), "--output", out, *domains, *rest)) == 0
    printed = capsys.readouterr().out
    manifest = load_manifest(tmp_path / "out")
    assert manifest.domain_names("train") == ["C4", "CommonCrawl"]
    assert manifest.domain_names("test") == ["ArXiv", "Book"]
    for entry in manifest.domains:
        row = next(line for line in printed.splitlines() if line.split()[:2] == [entry.split, entry.domain])
        assert row.split()[2:] == [str(entry.documents), str(entry.tokens), str(entry.bytes)]
    assert f"skipped: 1 in {bad}: not JSON" in printed
    assert manifest.options["on_error"] == "skip"


def test_a_tokenizer_must_be_chosen(records, tmp_path):
    arguments = parse("--input", str(records), "--output", str(tmp_path / "out"), "--train-domains", "C4")
    with pytest.raises(UserError, match=r"^--tokenizer: is not given; give a tokenizer.json, or `train`"):
        cli.run(arguments)


def test_message_after_an_interruption(records, tmp_path, tokenizer_file, capsys, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    given = ["--input", str(records), "--output", str(out), "--tokenizer", str(tokenizer_file), "--train-domains", "C4"]
    given += NO_FILTERS
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.prepare.run_stages", interrupt)
        assert cli.run(parse(*given)) == 75
    assert capsys.readouterr().err == f"selectron: stopped; rerun the same command to resume from {out}.partial\n"
    with monkeypatch.context() as patch:
        patch.setattr("data_prep.prepare.open_corpus", interrupt)
        with pytest.raises(KeyboardInterrupt):
            cli.run(parse(*given[:3], f"{out}2", *given[4:]))
    assert cli.run(parse(*given)) == 0


HANGS = """
import sys, time
from pathlib import Path
from data_prep.output import writing
from megatron_ext.cli import main
add, calls = writing.DomainWriter.add, []
def hang(*arguments):
    calls.append(arguments)
    if len(calls) == 10:
        Path(sys.argv[1]).touch()
        time.sleep(600)
    add(*arguments)
writing.DomainWriter.add = hang
sys.exit(main(sys.argv[2:]))
"""


def test_exit_code_after_sigterm(records, tmp_path, tokenizer_file):
    out, reached = tmp_path / "out", tmp_path / "reached"
    given = ["--input", str(records), "--output", str(out), "--tokenizer", str(tokenizer_file), "--train-domains", "C4"]
    given += NO_FILTERS
    command = [sys.executable, "-c", HANGS, str(reached), "prepare", *given]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 240
            while not reached.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
            process.terminate()
            _, output = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 75
    assert output.splitlines()[-1] == f"selectron: stopped; rerun the same command to resume from {out}.partial"
    assert cli.run(parse(*given)) == 0
    assert load_manifest(out).domain_names("train") == ["C4"]


def test_defaults_of_the_embedded_corpus():
    options = cli._options(parse("--input", "embedded", "--output", "x"))
    assert (options.train_domains, options.test_domains) == (["PythonDocs"], ["PythonCode"])
    assert (options.tokenizer, options.vocab_size, options.validation_fraction) == ("train", 4096, 0.05)


def test_filters_from_arguments():
    options = cli._options(parse("--input", "x", "--output", "y", "--tokenizer", "z"))
    assert (options.train_domains, options.test_domains, options.filtering) == (None, None, Filtering())
    near = ["--duplicates", "near", "--near-ngram-words", "3", "--near-buckets", "20", "--near-hashes-per-bucket", "5"]
    overlap = ["--decontaminate", "drop-train", "--contamination-threshold", "0.1", "--ngram-words", "8"]
    arguments = [*near, *overlap, "--nul", "drop", "--test-domains", ""]
    options = cli._options(parse("--input", "x", "--output", "y", "--tokenizer", "z", *arguments))
    assert options.test_domains == []
    assert options.filtering == Filtering(
        cleaning=CleaningOptions(nul="drop"),
        duplicates="near",
        near=NearOptions(ngram_words=3, buckets=20, hashes_per_bucket=5),
        overlap=OverlapOptions(action="drop_train", threshold=0.1, ngram_words=8),
    )
    filtering = cli._options(parse("--input", "x", "--output", "y", "--tokenizer", "z", *NO_FILTERS)).filtering
    assert (filtering.cleaning, filtering.duplicates, filtering.overlap) == (None, "keep", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-clean", "--nul", "drop"], "--nul: has no effect with these options; remove --no-clean"),
        (["--near-buckets", "3"], "--near-buckets: has no effect with these options; pass --duplicates near"),
        (["--decontaminate", "off", "--ngram-words", "8"], "--ngram-words: has no effect with these options; remove"),
        (["--duplicates", "near", "--near-buckets", "0"], "--near-buckets: 0 is not positive; "),
        (["--contamination-threshold", "1"], "--contamination-threshold: 1.0 is not in [0, 1); "),
    ],
)
def test_invalid_filters(arguments, message):
    with pytest.raises(UserError) as caught:
        cli._options(parse("--input", "x", "--output", "y", "--tokenizer", "z", *arguments))
    assert str(caught.value).startswith(message)


def test_exports_with_the_preparation_or_afterwards(records, tmp_path, tokenizer_file, capsys):
    out = str(tmp_path / "out")
    domains = ["--train-domains", "C4", "--test-domains", "ArXiv", *NO_FILTERS]
    given = ["--input", str(records), "--output", out, "--tokenizer", str(tokenizer_file), *domains]
    assert cli.run(parse(*given, "--export-megatron", str(tmp_path / "a/x"))) == 0
    assert f"exported: {tmp_path / 'a/x_train_C4_text_document'}.bin and .idx" in capsys.readouterr().out
    assert cli.run(parse("--output", out, "--export-megatron", str(tmp_path / "b/x"))) == 0
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert first == second
    assert {"x_train_C4_text_document.bin", "x_test_ArXiv_text_document.idx"} < set(first)


def test_export_arguments(tmp_path):
    with pytest.raises(UserError, match=r"^--input: is not given; give the documents, or export "):
        cli.run(parse("--output", str(tmp_path)))
    with pytest.raises(UserError, match=r"manifest.json: cannot be read "):
        cli.run(parse("--output", str(tmp_path), "--export-megatron", "x"))
    with pytest.raises(UserError, match=r"^--export-megatron: cannot run before the Slurm jobs have finished; "):
        cli.run(parse("--input", "x", "--output", "y", "--export-megatron", "x", "--executor", "slurm"))
