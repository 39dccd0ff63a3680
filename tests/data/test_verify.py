import re
import shutil
from pathlib import Path

import pytest

from data_prep.tokenization.tokenizer import train_tokenizer
from megatron_ext.data.verify import check_tokenizer, find_damage, verify_shards
from megatron_ext.utils.errors import UserError


@pytest.fixture
def copy(prepared, tmp_path) -> Path:
    shutil.copytree(prepared, tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("mode", ["sha256", "size"])
def test_undamaged_data_passes(prepared, manifest, mode):
    total = sum(len(entry.shards) for entry in manifest.domains)
    assert verify_shards(prepared, manifest, mode=mode) == total
    assert sum(verify_shards(prepared, manifest, mode=mode, rank=rank, world_size=3) for rank in range(3)) == total


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-512])
    else:
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


@pytest.mark.parametrize("suffix", [".tar", ".index.npy"])
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped"])
def test_damaged_file_is_named_in_one_line(copy, manifest, suffix, how):
    shard = manifest.select("train", ["CommonCrawl"])[0].shards[1]
    path = copy / shard.file.replace(".tar", suffix)
    size = path.stat().st_size
    damage(path, how)
    problem = {
        "missing": "is missing",
        "truncated": f"is truncated: expected {size} bytes, found {max(0, size - 512)}",
        "flipped": r"sha256 differs: expected [0-9a-f]{64}, found [0-9a-f]{64}",
    }[how]
    with pytest.raises(UserError) as caught:
        verify_shards(copy, manifest)
    expected = rf"{re.escape(str(path))}: {problem}; copy it again or prepare the data again"
    assert re.fullmatch(expected, str(caught.value))
    if how == "flipped":
        verify_shards(copy, manifest, mode="size")
    else:
        with pytest.raises(UserError, match=re.escape(str(path))):
            verify_shards(copy, manifest, mode="size")
    verify_shards(copy, manifest, ["test"])  # shards that a run does not read do not stop it
    verify_shards(copy, manifest, ["train"], ["C4"])


def test_each_shard_is_checked_by_exactly_one_rank(copy, manifest):
    shards = [shard for entry in manifest.domains for shard in entry.shards]
    for number, shard in enumerate(shards[:5]):
        content = (copy / shard.file).read_bytes()
        damage(copy / shard.file, "truncated")
        for rank in range(4):
            if rank == number % 4:
                with pytest.raises(UserError, match=re.escape(shard.file)):
                    verify_shards(copy, manifest, mode="size", rank=rank, world_size=4)
            else:
                verify_shards(copy, manifest, mode="size", rank=rank, world_size=4)
        (copy / shard.file).write_bytes(content)


def test_all_damage_of_a_split_is_found(copy, manifest):
    entries = manifest.select("train", ["C4", "CommonCrawl"])
    broken = [entries[0].shards[0], entries[1].shards[1], entries[1].shards[2]]
    damage(copy / broken[0].file, "missing")
    damage(copy / broken[1].index, "truncated")
    damage(copy / broken[2].file, "flipped")
    damage(copy / manifest.select("test")[0].shards[0].file, "missing")  # belongs to a split that is not checked
    found = [find_damage(copy, manifest, "train", ["C4", "CommonCrawl"], "sha256", rank, 2) for rank in range(2)]
    assert {one.shard: one.tokens for part in found for one in part} == {one.file: one.tokens for one in broken}
    problems = {one.shard: one.problem for part in found for one in part}
    assert problems[broken[0].file] == f"{copy / broken[0].file} is missing"
    assert f"{copy / broken[1].index} is truncated" in problems[broken[1].file]
    assert f"{copy / broken[2].file} sha256 differs" in problems[broken[2].file]
    assert [one.shard for one in find_damage(copy, manifest, "train", ["C4"], "size")] == [broken[0].file]


def test_disk_error_is_reported_as_damage(prepared, manifest, monkeypatch):
    def fails(_: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("data_prep.manifest.sha256_of", fails)
    shards = manifest.select("train", ["C4"])[0].shards
    found = find_damage(prepared, manifest, "train", ["C4"])
    assert [damage.shard for damage in found] == [shard.file for shard in shards]
    assert found[0].problem == f"{prepared / shards[0].file} or its index cannot be read (Input/output error)"


def test_tokenizer(prepared, manifest, tmp_path):
    assert check_tokenizer(prepared, manifest) == prepared / "tokenizer.json"
    same = shutil.copy(prepared / "tokenizer.json", tmp_path / "same.json")
    assert check_tokenizer(prepared, manifest, same) == same
    other = tmp_path / "other.json"
    train_tokenizer(["entirely other text"], 300).save(str(other))
    with pytest.raises(UserError) as caught:
        check_tokenizer(prepared, manifest, other)
    assert re.fullmatch(
        rf"{re.escape(str(other))}: is not the tokenizer of {re.escape(str(prepared / 'manifest.json'))}: "
        rf"sha256 [0-9a-f]{{12}}, expected [0-9a-f]{{12}}; use {re.escape(str(prepared / 'tokenizer.json'))} "
        r"or prepare the data again",
        str(caught.value),
    )
    with pytest.raises(UserError, match=r"absent\.json: is missing \(the tokenizer of .*manifest\.json\); "):
        check_tokenizer(prepared, manifest, tmp_path / "absent.json")
