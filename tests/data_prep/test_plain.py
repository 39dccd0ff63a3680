"""Records without domains, the most common format: a single domain, other keys, and an error for each fault."""

import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from prep_fakes import options, record, text, write_jsonl

from data_prep.manifest import load_manifest
from data_prep.prepare import prepare
from data_prep.splits import fingerprint
from data_prep.stages import Filtering
from megatron_ext.utils.errors import UserError

FAST = {"filtering": Filtering(cleaning=None, duplicates="keep", overlap=None)}
USUAL = {"train_domains": None, "test_domains": None, **FAST}
TEXTS = [text(number) for number in range(40)]


def plain(key="text", **more):
    return [json.dumps({key: one, **more}) for one in TEXTS]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("my corpus.v2.jsonl", "my corpus.v2"),
        ("texts.jsonl.zst", "texts"),
        ("folder/a.jsonl", "folder"),
        ("été!/a.jsonl", "_t__"),
        (".hidden.jsonl", "hidden"),
    ],
)
def test_input_without_domains_is_one_domain(tmp_path, tokenizer_file, source, name):
    path = write_jsonl(tmp_path / source, plain())
    given = path.parent if "/" in source else path
    manifest = prepare(options(given, tmp_path / "out", tokenizer_file, **USUAL))
    held_out = sum(fingerprint(one) < 0.2 * 2**64 for one in TEXTS)
    assert 0 < held_out < 40
    assert {(entry.split, entry.domain): entry.documents for entry in manifest.domains} == {
        ("train", name): 40 - held_out,
        ("validation", name): held_out,
    }
    assert (manifest.options["domain"], manifest.options["train_domains"]) == (name, [name])
    assert load_manifest(tmp_path / "out") == manifest


def test_other_inputs_without_domains(tmp_path, tokenizer_file):
    """Text files without subfolders, Parquet files, and files in folders of splits, with in-domain test documents."""
    for number, one in enumerate(TEXTS):
        (tmp_path / "texts").mkdir(exist_ok=True)
        (tmp_path / "texts" / f"{number}.txt").write_text(one)
    (tmp_path / "table").mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "table" / "a.parquet")
    for split in ("train", "test"):
        write_jsonl(tmp_path / "split" / split / "a.jsonl", plain())
    for name in ("texts", "table", "split"):
        manifest = prepare(options(tmp_path / name, tmp_path / f"{name}.out", tokenizer_file, **USUAL))
        assert {entry.domain for entry in manifest.domains} == {name}
        assert {entry.split for entry in manifest.domains} == {"train", "validation"} | (
            {"test"} if name == "split" else set()
        )
        assert sum(entry.documents for entry in manifest.domains) == (80 if name == "split" else 40)


def test_a_name_and_test_domains_may_be_given(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "raw/a.jsonl", [*plain(), *(record("Law", text(f"law{i}")) for i in range(5))])
    given = {**USUAL, "domain": "Web", "test_domains": ["law"]}
    manifest = prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **given))
    assert manifest.domain_names("train") == ["Web"]
    assert manifest.domain_names("test") == ["Law"]
    with pytest.raises(UserError, match=r"^--train-domains/--test-domains: '../x' is not a valid folder name; "):
        prepare(options(tmp_path / "raw", tmp_path / "out2", tokenizer_file, **{**USUAL, "domain": "../x"}))


def test_default_domains_if_records_name_them(tmp_path, tokenizer_file):
    write_jsonl(tmp_path / "raw/a.jsonl", [record("Law", "x"), *plain()])
    with pytest.raises(
        UserError, match=r"^--train-domains: is not given, and the input has none of the default domains"
    ):
        prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **USUAL))
    with pytest.raises(UserError, match=r"a\.jsonl:2: no domain \(neither .*\); give such records a domain with --dom"):
        prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **{**USUAL, "train_domains": ["Law"]}))


def test_keys_of_other_names(tmp_path, tokenizer_file):
    lines = [json.dumps({"content": one, "about": {"source": "Web"}, "domain": 3}) for one in TEXTS]
    write_jsonl(tmp_path / "raw/a.jsonl", lines)
    table = pyarrow.table({"content": TEXTS, "about": [{"source": "Web", "other": n} for n in range(40)]})
    pyarrow.parquet.write_table(table, tmp_path / "raw/b.parquet")
    keys = {"text_key": "content", "domain_key": "about.source", "train_domains": ["web"], "test_domains": []}
    manifest = prepare(options(tmp_path / "raw", tmp_path / "out", tokenizer_file, **{**FAST, **keys}))
    assert (sum(entry.documents for entry in manifest.domains), manifest.skipped) == (80, [])
    assert {entry.domain for entry in manifest.domains} == {"Web"}


PACKED = zstandard.compress("\n".join(plain()).encode())


@pytest.mark.parametrize("named", [{}, {"train_domains": ["C4"]}])
@pytest.mark.parametrize(
    ("name", "content", "message", "counted"),
    [
        ("a.jsonl", b'{"text": ', "a.jsonl:1: not JSON (Expecting value: line 1", "1 not JSON"),
        ("a.jsonl.zst", PACKED[:-9], "a.jsonl.zst:1: compressed stream broken (the file ends", "1 compressed stream"),
        (
            "a.jsonl",
            "\n".join(plain("content", id=1)).encode(),
            "a.jsonl:1: no text (no `text` among its keys: content, id); give the key of the text with --text-key or ",
            "40 no text",
        ),
        (
            "a.jsonl",
            b"\n\n",
            "--input: contains no readable record (it is empty); give another input",
            "there are none",
        ),
        ("a.parquet", b"PAR1", "a.parquet:1: Parquet file broken (", "1 Parquet file broken"),
    ],
)
def test_messages_about_malformed_inputs(tmp_path, tokenizer_file, name, content, message, counted, named):
    (tmp_path / name).write_bytes(content)
    given = {**USUAL, **named}
    where = "" if message.startswith("--") else f"{tmp_path}/"
    with pytest.raises(UserError) as caught:
        prepare(options(tmp_path / name, tmp_path / "out", tokenizer_file, **given))
    assert str(caught.value).startswith(where + message)
    with pytest.raises(UserError) as caught:
        prepare(options(tmp_path / name, tmp_path / "out", tokenizer_file, on_error="skip", **given))
    assert counted in str(caught.value) or str(caught.value).startswith(where + message)
    assert [path.name for path in tmp_path.iterdir()] == [name]
