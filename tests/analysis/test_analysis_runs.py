"""Reading of run folders: tolerated defects, and one-line errors for others."""

import json
import re

import numpy as np
import pytest
from analysis_synthetic import TOKENS_A_STEP, Synthetic, evaluation_lines, write_run

from megatron_ext.analysis.runs import read_run, read_runs
from megatron_ext.utils.errors import UserError


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "attention", Synthetic())


def edit_line(file, number, change):
    """Replace line `number` (from 1) of a JSON Lines file by the result of `change` for its record."""
    lines = file.read_text().splitlines()
    record = json.loads(lines[number - 1])
    lines[number - 1] = change(record) if isinstance(change(dict(record)), str) else json.dumps(change(record))
    file.write_text("\n".join(lines) + "\n")


def message_of(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_reads_what_was_written(folder):
    run = read_run(folder)
    assert (run.name, run.seed, run.pattern) == ("attention", 1, "attention*4")
    assert run.steps.tolist() == list(range(1, 201))
    assert run.tokens[-1] == 200 * TOKENS_A_STEP
    assert run.evaluation_steps.tolist() == list(range(20, 201, 20))
    assert [(one.split, one.domain) for one in run.domains] == [
        ("test", "code"),
        ("test", "maths"),
        ("validation", "web"),
    ]
    first = json.loads(next(iter(evaluation_lines(Synthetic()))))
    web = run.split("validation")[0]
    assert web.losses.shape == (10, 40)
    np.testing.assert_array_equal(web.losses[0], first["document_loss"])


def test_half_written_last_line_is_ignored_with_a_warning(folder, capsys):
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        file = folder / name
        file.write_bytes(file.read_bytes()[:-30])
    run = read_run(folder)
    assert run.steps[-1] == 199
    assert run.evaluation_steps[-1] == 180
    err = capsys.readouterr().err
    assert f"warning: {folder}/metrics.jsonl:200: incomplete last line ignored" in err
    assert f"warning: {folder}/evaluation.jsonl:30: incomplete last line ignored" in err
    assert "evaluation at step 200 ignored: it was interrupted before maths (test)" in err


def test_evaluation_beyond_the_metrics_is_ignored_with_a_warning(folder, capsys):
    file = folder / "metrics.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-5]))
    assert read_run(folder).evaluation_steps[-1] == 180
    assert "evaluation at step 200 ignored: metrics.jsonl has no such step" in capsys.readouterr().err


def test_of_a_step_written_twice_the_later_line_counts(folder):
    """A run that was killed and resumed from its last checkpoint records the steps after the checkpoint twice."""
    file = folder / "metrics.jsonl"
    again = json.loads(file.read_text().splitlines()[149]) | {"loss": 9.0}
    file.write_text(file.read_text() + json.dumps(again) + "\n")
    run = read_run(folder)
    assert len(run.steps) == 200
    assert run.losses[149] == 9.0


def test_evaluation_before_training_is_left_out(folder):
    file = folder / "evaluation.jsonl"
    zero = [json.dumps(json.loads(line) | {"step": 0}) for line in file.read_text().splitlines()[:3]]
    file.write_text("\n".join(zero) + "\n" + file.read_text())
    assert read_run(folder).evaluation_steps[0] == 20


def test_pieces_of_a_document_are_one_document(folder):
    """Parts of a document are merged, because they are not independent of each other."""

    def cut_first(record):
        for key in ("document_loss", "document_tokens"):
            record[key] = [record[key][0] // 2, record[key][0] - record[key][0] // 2, *record[key][1:]]
        return record | {"documents": [record["documents"][0], *record["documents"]]}

    unsplit = read_run(folder).domains
    for number in range(1, 31):
        edit_line(folder / "evaluation.jsonl", number, cut_first)
    for one, other in zip(unsplit, read_run(folder).domains, strict=True):
        np.testing.assert_array_equal(one.documents, other.documents)
        np.testing.assert_allclose(one.losses, other.losses, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("config.yaml", "give the folder of a run: it contains config.yaml, metrics.jsonl and evaluation.jsonl"),
        ("metrics.jsonl", "give the folder of a run"),
        ("evaluation.jsonl", "train with training.evaluate_every above 0"),
    ],
)
def test_missing_file(folder, name, hint):
    (folder / name).unlink()
    assert message_of(read_run, folder) == f"{folder}/{name}: is missing; {hint}"


REPEAT = "restore the file or repeat the run"


@pytest.mark.parametrize(
    ("name", "number", "change", "problem"),
    [
        ("metrics.jsonl", 7, lambda r: '{"step": 7, "los', "is not a JSON object"),
        ("metrics.jsonl", 200, lambda r: '{"step": 200, "los', "is not a JSON object"),
        ("metrics.jsonl", 7, lambda r: "[1, 2]", "is not a JSON object"),
        ("metrics.jsonl", 7, lambda r: r | {"loss": float("nan")}, "loss: input should be a finite number"),
        ("metrics.jsonl", 7, lambda r: r | {"step": "7"}, "step: input should be a valid integer"),
        ("metrics.jsonl", 7, lambda r: r | {"step": 10**30}, f"step: input should be less than {1 << 63}"),
        ("metrics.jsonl", 7, lambda r: r | {"tokens": 10**30}, f"tokens: input should be less than {1 << 63}"),
        ("evaluation.jsonl", 2, lambda r: {"step": 20}, "domain: field required"),
        (
            "evaluation.jsonl",
            2,
            lambda r: r | {"split": "train"},
            "split: input should be 'test', 'validation' or 'test_in_domain'",
        ),
        (
            "evaluation.jsonl",
            2,
            lambda r: r | {"document_loss": r["document_loss"][:-1]},
            "documents, document_loss and document_tokens differ in length",
        ),
        ("evaluation.jsonl", 1, lambda r: r | {"num_tokens": 5}, "num_tokens 5 but its documents have TOKENS"),
        ("evaluation.jsonl", 1, lambda r: r | {"loss": 99.0}, "loss 99 but its documents give LOSS"),
    ],
)
def test_damaged_line_is_named(folder, name, number, change, problem):
    first = json.loads((folder / "evaluation.jsonl").read_text().splitlines()[0])
    problem = problem.replace("TOKENS", str(first["num_tokens"])).replace("LOSS", f"{first['loss']:.6g}")
    edit_line(folder / name, number, change)
    assert message_of(read_run, folder) == f"{folder}/{name}:{number}: {problem}; {REPEAT}"


def test_damaged_bytes_are_named(folder):
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().split(b"\n")
    lines[2] = b"\xff\xfe\x00" * 9
    file.write_bytes(b"\n".join(lines))
    assert message_of(read_run, folder) == f"{file}:3: is not a JSON object; {REPEAT}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [1\n", r":2: is not YAML \(.*\)"),
        ("model: {pattern: attention*4}\ntraining: {seed: 1}\n", ": has no run.name"),
        ("just a word\n", ": has no model.pattern"),
        ("", ": has no model.pattern"),
    ],
)
def test_damaged_configuration(folder, text, message):
    (folder / "config.yaml").write_text(text)
    hint = "restore the configuration that was saved with the run"
    assert re.fullmatch(re.escape(f"{folder}/config.yaml") + message + "; " + hint, message_of(read_run, folder))


def test_empty_files(folder):
    (folder / "evaluation.jsonl").write_text("")
    hint = "train with training.evaluate_every above 0"
    where = f"{folder}/evaluation.jsonl"
    assert message_of(read_run, folder) == f"{where}: contains no evaluation after a training step; {hint}"
    (folder / "metrics.jsonl").write_text("")
    assert message_of(read_run, folder) == f"{folder}/metrics.jsonl: contains no step; train the run first"


def test_gap_among_evaluations_is_refused(folder):
    file = folder / "evaluation.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:4] + lines[5:]))
    assert message_of(read_run, folder) == f"{file}: the evaluation at step 40 lacks code (test); {REPEAT}"


def test_other_documents_at_another_step(folder):
    file = folder / "evaluation.jsonl"
    edit_line(file, 4, lambda r: r | {"documents": [d + 1 for d in r["documents"]]})
    problem = f"domain web has other documents than at {file}:1"
    hint = "evaluate a run on the same data at every step"
    assert message_of(read_run, folder) == f"{file}:4: {problem}; {hint}"


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"documents": {"web": 40, "code": 30}}, "evaluated on code (test), web (validation), the first run on ALL"),
        ({"documents": {"web": 40, "code": 31, "maths": 20}}, "domain code (test) has other documents than"),
        ({"corpus_seed": 8}, "domain code (test) has other documents than the first run's"),
        ({"config": {"data": {"train_domains": ["books"]}}}, "trained on books, the first run on web"),
    ],
)
def test_runs_on_different_data(folder, tmp_path, other, problem):
    second = write_run(tmp_path / "other", Synthetic(seed=2, **other))
    problem = problem.replace("ALL", "code (test), maths (test), web (validation)")
    message = message_of(read_runs, [folder, second])
    assert message.startswith(f"{second}: {problem}")
    assert message.endswith(f"; compare runs over the same data; the first run is {folder}")


def test_nothing_out_of_domain(tmp_path):
    folder = write_run(tmp_path / "run", Synthetic(documents={"web": 10}))
    message = message_of(read_runs, [folder])
    where = f"{folder}/evaluation.jsonl"
    assert message == f"{where}: has no out-of-domain (split test) evaluation; train with data.test_domains"


def test_no_folder_and_the_same_twice(folder):
    assert message_of(read_runs, []) == "RUN: no run folder given; give at least one"
    twice = folder / ".." / folder.name
    assert message_of(read_runs, [folder, twice]) == f"{twice}: is given twice; give every run folder once"


SIZE = {"parameters": 1000, "embedding_parameters": 300, "output_layer_parameters": 0}


def test_a_folder_of_runs_is_those_runs(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / "sweep" / name, Synthetic(name=name, size=SIZE | {"parameters": 1000 + ord(name)}))
    (tmp_path / "sweep" / "report").mkdir()
    (tmp_path / "sweep" / "log").touch()
    runs = read_runs([tmp_path / "sweep"])
    assert [(run.path, run.size.parameters) for run in runs] == [
        (tmp_path / "sweep" / "a", 1097),
        (tmp_path / "sweep" / "b", 1098),
    ]
    assert "/a: is given twice; give every run folder once" in message_of(
        read_runs, [tmp_path / "sweep", tmp_path / "sweep" / "a"]
    )
    assert "report/config.yaml: is missing; give the folder of a run" in message_of(
        read_runs, [tmp_path / "sweep" / "report"]
    )


@pytest.mark.parametrize("evaluations", ["", None, "beyond"])
def test_a_run_need_not_be_evaluated_where_none_asks(tmp_path, evaluations, capsys):
    evaluated = write_run(tmp_path / "evaluated", Synthetic())
    plain = write_run(tmp_path / "plain", Synthetic(seed=2))
    file = plain / "evaluation.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("" if evaluations != "beyond" else "".join(line.replace(": 20,", ": 999,") for line in lines[:3]))
    if evaluations is None:
        file.unlink()
    runs = read_runs([plain, evaluated], evaluated=False)
    assert [len(run.domains) for run in runs] == [0, 3]
    assert runs[0].evaluation_steps.tolist() == []
    with pytest.raises(
        UserError, match=r"evaluation\.jsonl: (is missing|contains no evaluation after a training step)"
    ):
        read_runs([plain, evaluated])
    assert ("evaluation at step 999 ignored" in capsys.readouterr().err) == (evaluations == "beyond")
    other = write_run(tmp_path / "other", Synthetic(seed=3, corpus_seed=8))
    assert "has other documents than the first run's" in message_of(
        lambda: read_runs([plain, evaluated, other], evaluated=False)
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is not a JSON object"),
        ("[]", "is not a JSON object"),
        ('{"parameters": 3}', "embedding_parameters: field required"),
        (json.dumps(SIZE | {"parameters": 0}), "parameters: input should be greater than 0"),
    ],
)
def test_a_damaged_size(folder, text, problem):
    (folder / "model.json").write_text(text)
    hint = "restore the file or resume the run, which rewrites it"
    assert message_of(read_run, folder) == f"{folder}/model.json: {problem}; {hint}"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "evaluation.jsonl"])
def test_what_has_no_end_is_not_read(folder, name):
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    assert f"{folder}/{name}: cannot be read (is not a regular file)" in message_of(read_run, folder)
