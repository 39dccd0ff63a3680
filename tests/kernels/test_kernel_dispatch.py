"""Dispatch between Triton and the reference, apart from the cases in the ops' own tests."""

import logging

import pytest
import torch

from kernels.common.dispatch import Choice, choose, choose_triton_or_reference, plain_torch, recorded_choices

Q = torch.zeros(1, 1, 1, 1)


@pytest.mark.parametrize("unsupported_reason", [None, "it rains: wait"])
def test_on_a_cpu_auto_means_the_reference(unsupported_reason, caplog):
    caplog.set_level(logging.DEBUG, logger="kernels.common.dispatch")
    assert choose_triton_or_reference("walk", "auto", Q, unsupported_reason).name == "reference"
    assert "walk: reference (triton's kernels need a GPU, and the inputs are on cpu)" in caplog.text


def test_what_is_asked_for_is_taken():
    assert choose_triton_or_reference("walk", "triton", Q, None).name == "triton"
    assert choose_triton_or_reference("walk", "reference", Q, "it rains: wait").name == "reference"


def test_the_first_plain_form_is_the_automatic_one():
    forms = ("swift", "slow")
    assert choose_triton_or_reference("walk", "auto", Q, None, forms).name == "swift"
    assert choose_triton_or_reference("walk", "slow", Q, None, forms).name == "slow"
    with pytest.raises(ValueError, match=r"but walk has: use one of .'auto', 'swift', 'slow', 'triton'.$"):
        choose_triton_or_reference("walk", "reference", Q, None, forms)


def test_triton_is_refused_with_the_obstacle():
    with pytest.raises(ValueError, match=r"^implementation is 'triton', but it rains: wait$"):
        choose_triton_or_reference("walk", "triton", Q, "it rains: wait")


def test_another_implementation_is_refused():
    with pytest.raises(ValueError, match=r"but walk has: use one of .'auto', 'reference', 'triton'.$"):
        choose_triton_or_reference("walk", "cuda", Q, None)


def choose_scan(requested):
    return choose("walk", requested, ("swift", "slow"), Choice("swift", "it is dry"), "slow")


def test_plain_torch_turn_auto_alone():
    with plain_torch():
        with plain_torch():
            assert choose_scan("auto") == Choice("slow", "plain torch requested")
        assert choose_scan("auto").name == "slow"
        assert choose_scan("swift") == Choice("swift", "requested")
        assert choose_triton_or_reference("walk", "auto", Q, None, ("plain", "loop")).name == "plain"
    assert choose_scan("auto") == Choice("swift", "it is dry")


def test_plain_torch_end_with_an_exception():
    with pytest.raises(ValueError, match="use one of"), plain_torch():
        choose_scan("swim")
    assert choose_scan("auto").name == "swift"


def test_records_may_end_in_any_order():
    first, second = recorded_choices(), recorded_choices()
    in_first, in_second = first.__enter__(), second.__enter__()
    first.__exit__(None, None, None)
    choose_scan("swift")
    second.__exit__(None, None, None)
    choose_scan("slow")
    assert (in_first, in_second) == ([], [("walk", Choice("swift", "requested"))])
