"""The command `selectron generate` beyond the training length of a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.commands.generate import _check_length
from megatron_ext.utils.errors import UserError


def _trained(*, learns_positions: bool) -> Any:
    model = SimpleNamespace(max_position_embeddings=100)
    shape = SimpleNamespace(model=model, learns_positions=learns_positions)
    return SimpleNamespace(shape=shape, config=SimpleNamespace(data=SimpleNamespace(seq_length=64)))


@pytest.mark.parametrize("learns_positions", [True, False])
def test_text_beyond_the_trained_length_is_warned_of(
    capsys: pytest.CaptureFixture[str], learns_positions: bool
) -> None:
    trained = _trained(learns_positions=learns_positions)
    _check_length(trained, 4, 60)
    assert capsys.readouterr().err == ""
    _check_length(trained, 5, 60)
    message = "a prompt of 5 tokens and 60 more exceed the training sequence length 64; text beyond it may be poor"
    assert capsys.readouterr().err == f"selectron: warning: {message}\n"


def test_positions_that_there_are_no_rows_for_are_refused() -> None:
    _check_length(_trained(learns_positions=False), 5, 96)
    with pytest.raises(UserError, match="96 after a prompt of 5 tokens exceeds"):
        _check_length(_trained(learns_positions=True), 5, 96)
