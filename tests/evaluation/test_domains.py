"""Selection and naming of the domains that a run is evaluated on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from corpora import prepared

from data_prep.manifest import DomainEntry, Manifest, load_manifest
from megatron_ext.config.schema import DataConfig
from megatron_ext.data.datasets import open_data, open_evaluation_data, select_domains
from megatron_ext.evaluation.domain_results import DomainOptions, domain_losses
from megatron_ext.evaluation.domains import EvaluationDomain, evaluation_domains
from megatron_ext.utils.errors import UserError

ALL = [
    ("First", "validation"),
    ("Second", "validation"),
    ("First", "test_in_domain"),
    ("Second", "test_in_domain"),
    ("Other", "test"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with two training domains and one other domain, each with test documents."""
    return prepared(tmp_path_factory.mktemp("folders"), documents=90, words=(5, 40), test_folder=True)


def _in_training(root: Path, **fields: object) -> list[EvaluationDomain]:
    data = open_data(DataConfig(path=str(root), seq_length=32, **fields), seed=1)  # type: ignore[arg-type]
    return evaluation_domains(data.root, data.manifest, data.train_domains, data.test_domains, 32, 0)


def _afterwards(root: Path, **fields: object) -> list[EvaluationDomain]:
    return evaluation_domains(*open_evaluation_data(DataConfig(path=str(root), **fields)), 32, 0)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("opened", [_in_training, _afterwards])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ALL),
        ({"train_domains": ["RedPajamaFirst", "second"]}, ALL),
        ({"test_domains": ["other"]}, [ALL[0], ALL[1], ALL[4]]),
        ({"train_domains": ["First"]}, [ALL[0], ALL[2], ALL[4]]),
        # "Second" is out of domain for this run, but only evaluated as such if the user names it.
        ({"train_domains": ["First"], "test_domains": ["first", "Second"]}, [ALL[0], ALL[2], ("Second", "test")]),
    ],
    ids=["default", "spelling", "named", "part", "part_named"],
)
def test_text_of_a_trained_domain_is_never_out_of_domain(opened, fields, expected, root: Path) -> None:  # type: ignore[no-untyped-def]
    assert [(one.name, one.split) for one in opened(root, **fields)] == expected


@pytest.mark.usefixtures("one_process")
def test_held_out_test_text_is_that_of_the_folder(root: Path) -> None:
    raw = [json.loads(line) for line in (root.parent / "raw/test/x.jsonl").open()]
    texts = [one["text"] for one in raw if one["meta"]["redpajama_set_name"] == "First"]
    (found,) = [one for one in _in_training(root) if (one.name, one.split) == ("First", "test_in_domain")]
    assert found.num_documents == len(texts) > 0
    tokens = sum(int(found.samples[index].loss_mask.sum()) for index in range(len(found.samples)))
    record = {"domain": "First", "split": "test_in_domain", "loss": 2.0, "num_tokens": tokens}
    record |= {"document_loss": [2.0 * tokens], "document_tokens": [tokens]}
    (loss,) = domain_losses([record], load_manifest(root), DomainOptions())
    size = sum(len(text.encode()) for text in texts)
    assert (loss.split, loss.loss_per_byte) == ("test_in_domain", pytest.approx(2.0 * tokens / size))


def _manifest(root: Path, *there: tuple[str, str]) -> Manifest:
    entries = [DomainEntry(split, name, 1, 1, 1, 1, []) for split, name in there]  # type: ignore[arg-type]
    return replace(load_manifest(root), domains=entries)


def test_a_trained_domain_without_test_text_is_refused_as_a_test_domain(root: Path) -> None:
    manifest = _manifest(root, ("train", "C4"), ("validation", "C4"), ("test", "ArXiv"))
    assert select_domains(DataConfig(path="x"), manifest) == (["C4"], ["ArXiv"])
    with pytest.raises(UserError, match=r"^data.test_domains: no domain C4 in the test split of the data; choose from"):
        select_domains(DataConfig(path="x", test_domains=["ArXiv", "C4"]), manifest)
    with pytest.raises(UserError, match=r"^data.train_domains: no domain Law in the train split of the data; choose "):
        select_domains(DataConfig(path="x", train_domains=["Law"]), manifest)
