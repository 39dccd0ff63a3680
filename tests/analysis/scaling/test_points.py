"""CSV files of points, and errors in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.analysis.scaling.points import read_points
from megatron_ext.utils.errors import UserError


def written(folder: Path, text: str) -> Path:
    path = folder / "points.csv"
    path.write_text(text)
    return path


def test_columns_in_any_order_with_others_between(tmp_path: Path) -> None:
    path = written(tmp_path, "\ufeffloss, seed, tokens,params\n2.5,1,1e9,3e7\n2.25,2, 2000000000,6e7\n\n")
    (points,) = read_points(path).values()
    assert points.params.tolist() == [3e7, 6e7]
    assert points.tokens.tolist() == [1e9, 2e9]
    assert points.losses.tolist() == [2.5, 2.25]


def test_mixers_apart_in_their_order(tmp_path: Path) -> None:
    path = written(tmp_path, "mixer,params,tokens,loss\nmamba,1,2,3\nattention,4,5,6\nmamba,7,8,9\n")
    found = read_points(path)
    assert list(found) == ["mamba", "attention"]
    assert found["mamba"].losses.tolist() == [3, 9]


def test_losses_on_other_text(tmp_path: Path) -> None:
    path = written(tmp_path, "params,tokens,loss,test_loss\n1,2,3,3.5\n4,5,6,6.5\n")
    (points,) = read_points(path).values()
    assert points.test_losses is not None
    assert points.test_losses.tolist() == [3.5, 6.5]
    some = points.take(points.params > 1)
    assert some.test_losses is not None
    assert (some.losses.tolist(), some.test_losses.tolist()) == ([6], [6.5])
    (without,) = read_points(written(tmp_path, "params,tokens,loss\n1,2,3\n")).values()
    assert without.test_losses is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "params,loss\n1,2\n",
            "points.csv: has no column tokens; its columns are params, loss; name the columns params",
        ),
        ("", "points.csv: has no column params, tokens, loss; its columns are none; "),
        ("params,tokens,loss\n", "points.csv: contains no points; "),
        ("params,tokens,loss\n1,2,3\n1,2,x\n", "points.csv:3: loss is 'x', not a number above 0; fix the value"),
        ("params,tokens,loss\n1,2,3\n1,2\n", "points.csv:3: loss is None, not a number above 0; "),
        ("params,tokens,loss\n0,2,3\n", "points.csv:2: params is '0', not a number above 0; "),
        ("params,tokens,loss\n1,nan,3\n", "points.csv:2: tokens is 'nan', not a number above 0; "),
        ("params,tokens,loss\n1,2,inf\n", "points.csv:2: loss is 'inf', not a number above 0; "),
        ("params,tokens,loss,test_loss\n1,2,3,-1\n", "points.csv:2: test_loss is '-1', not a number above 0; "),
        ("params,tokens,loss,mixer\n1,2,3,\n", "points.csv:2: mixer is empty; give the mixer of every point"),
    ],
)
def test_what_is_no_point(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        read_points(written(tmp_path, text))
    assert said in str(caught.value)


def test_what_is_no_file_of_points(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.csv: cannot be read \(No such file or directory\); give a CSV file"):
        read_points(tmp_path / "nowhere.csv")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\); give a CSV file"):
        read_points(tmp_path)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"binary\.csv: is not CSV \("):
        read_points(tmp_path / "binary.csv")
