"""Small YAML texts that expand to large values or take long to parse: they are refused early."""

import itertools
from collections.abc import Callable

import pytest
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import SafeConstructor
from ruamel.yaml.scanner import Scanner

from megatron_ext.analysis.runs import read_run
from megatron_ext.config.load import apply_override, read_tree
from megatron_ext.config.yaml_text import parse_yaml
from megatron_ext.utils.errors import UserError

LEVELS = "abcdefghijklmnop"


def aliases(form: str) -> str:
    """Nested aliases. Each level holds the previous one nine times: 9**15 values."""
    pairs = itertools.pairwise(LEVELS)
    lines = [f"{name}: &{name} {form.format(','.join([f'*{below}'] * 9))}" for below, name in pairs]
    return "\n".join(["a: &a {k: v}", *lines])


BOMBS = {
    "lists": aliases("[{}]"),
    "merges": aliases("{{<<: [{}]}}"),
    "itself": "a: &a [*a]",
    "itself_in_a_mapping": "a: &a {b: *a}",
    "brackets": "[" * 200_000,
    "few_brackets": "[" * 5_000,
    "braces": "{a: " * 5_000,
    "dashes": "- " * 100_000,
    "questions": "? " * 100_000,
    "list": "a: [" + "x," * 100_000 + "]",
    "keys": "".join(f"k{i}: 1\n" for i in range(20_000)),
    "one_key": "k: 1\n" * 20_000,
    "anchors": "".join(f"- &a{i} x\n" for i in range(20_000)),
    "documents": "---\n" * 50_000,
    "long": "a: " + "x" * 300_000,
    "digits": "a: " + "1" * 100_000,
    "code": "a: !!python/object/apply:os.system [id]",
}


def as_file(text: str, folder) -> None:  # type: ignore[no-untyped-def]
    (folder / "c.yaml").write_text(text)
    read_tree(folder / "c.yaml")


def as_override(text: str, folder) -> None:  # type: ignore[no-untyped-def]
    apply_override({}, f"run.name={text}", {})


def as_run(text: str, folder) -> None:  # type: ignore[no-untyped-def]
    (folder / "config.yaml").write_text(text)
    read_run(folder)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts of parser steps: token checks, composed nodes and constructed values."""
    counts = dict.fromkeys(("fetch_more_tokens", "compose_node", "construct_object"), 0)
    for kind, name in zip((Scanner, Composer, SafeConstructor), counts, strict=True):
        original = getattr(kind, name)

        def counted(*args, name: str = name, original=original, **options):  # type: ignore[no-untyped-def]
            counts[name] += 1
            return original(*args, **options)

        monkeypatch.setattr(kind, name, counted)
    return counts


@pytest.mark.parametrize("read", [as_file, as_override, as_run])
@pytest.mark.parametrize("name", BOMBS)
def test_large_yaml_is_rejected_quickly(tmp_path, name: str, read: Callable[..., None], work: dict[str, int]) -> None:
    """Count steps of about 0.1 ms each, because times on a busy machine are unreliable."""
    with pytest.raises(UserError, match=r"is too large for a|is not (valid )?YAML|cannot be read") as caught:
        read(BOMBS[name], tmp_path)
    assert sum(work.values()) < 1_500
    assert work["construct_object"] <= 3  # aliased values are not constructed
    assert len(str(caught.value)) < 10_000 + 500
    assert str(caught.value).isprintable()


def test_node_limit(work: dict[str, int]) -> None:
    assert parse_yaml("a: [1, 2]") == {"a": [1, 2]}
    assert work["fetch_more_tokens"] > 5
    assert (work["compose_node"], work["construct_object"]) == (5, 5)


def test_valid_yaml_is_read():
    assert parse_yaml("a: &x [1, 2]\nb: {c: *x}\nd: {<<: {e: 1e-3}, f: 2026-01-31}") == {
        "a": [1, 2],
        "b": {"c": [1, 2]},
        "d": {"e": 1e-3, "f": "2026-01-31"},
    }
    sweep = "".join(f"run{i}:\n  optimizer.lr: {i}e-5\n  training.steps: {i}\n" for i in range(300))
    assert parse_yaml(sweep)["run299"] == {"optimizer.lr": 299e-5, "training.steps": 299}
