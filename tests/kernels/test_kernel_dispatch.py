"""Dispatch between Triton and the reference, apart from the cases in the ops' own tests."""

import logging

import pytest
import torch

from kernels.common.dispatch import Choice, choose, choose_triton_or_reference, plain_torch, recorded_choices

Q = torch.zeros(1, 1, 1, 1)


@pytest.mark.parametrize("unsupported_reason", [None, "it rains: wait"])
def test_auto_chooses_the_reference_on_a_cpu(unsupported_reason, caplog):
    caplog.set_level(logging.DEBUG, logger="kernels.common.dispatch")
    assert choose_triton_or_reference("walk", "auto", Q, unsupported_reason).name == "reference"
    assert "walk: reference (triton's kernels need a GPU, and the inputs are on cpu)" in caplog.text


def test_requested_implementation_is_chosen():
    assert choose_triton_or_reference("walk", "triton", Q, None).name == "triton"
    assert choose_triton_or_reference("walk", "reference", Q, "it rains: wait").name == "reference"


def test_auto_falls_back_to_the_first_plain_implementation():
    forms = ("swift", "slow")
    assert choose_triton_or_reference("walk", "auto", Q, None, forms).name == "swift"
    assert choose_triton_or_reference("walk", "slow", Q, None, forms).name == "slow"
    with pytest.raises(ValueError, match=r"but walk has: use one of .'auto', 'swift', 'slow', 'triton'.$"):
        choose_triton_or_reference("walk", "reference", Q, None, forms)


def test_unsupported_triton_raises_with_the_reason():
    with pytest.raises(ValueError, match=r"^implementation is 'triton', but it rains: wait$"):
        choose_triton_or_reference("walk", "triton", Q, "it rains: wait")


def test_unknown_implementation_raises():
    with pytest.raises(ValueError, match=r"but walk has: use one of .'auto', 'reference', 'triton'.$"):
        choose_triton_or_reference("walk", "cuda", Q, None)


def choose_scan(requested):
    return choose("walk", requested, ("swift", "slow"), Choice("swift", "it is dry"), "slow")


def test_plain_torch_affects_only_auto():
    with plain_torch():
        with plain_torch():
            assert choose_scan("auto") == Choice("slow", "plain torch requested")
        assert choose_scan("auto").name == "slow"
        assert choose_scan("swift") == Choice("swift", "requested")
        assert choose_triton_or_reference("walk", "auto", Q, None, ("plain", "loop")).name == "plain"
    assert choose_scan("auto") == Choice("swift", "it is dry")


def test_plain_torch_ends_with_an_exception():
    with pytest.raises(ValueError, match="use one of"), plain_torch():
        choose_scan("swim")
    assert choose_scan("auto").name == "swift"


def test_overlapping_records():
    first, second = recorded_choices(), recorded_choices()
    in_first, in_second = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    choose_scan("swift")
    second.__exit__(None, None, None)
    choose_scan("slow")
    assert (in_first, in_second) == ([], [("walk", Choice("swift", "requested"))])
