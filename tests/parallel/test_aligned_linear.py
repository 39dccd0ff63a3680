"""Projection with a weight padded by rows of zeros, compared with the plain projection."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.parallel.aligned_linear import AlignedColumnParallelLinear


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each weight that Megatron multiplies with."""
    rows: list[int] = []
    apply = layers.LinearWithGradAccumulationAndAsyncCommunication.apply

    def counted(x: Any, weight: Any, *args: Any) -> Any:
        rows.append(len(weight))
        return apply(x, weight, *args)

    monkeypatch.setattr(layers.LinearWithGradAccumulationAndAsyncCommunication, "apply", counted)
    return rows


@pytest.mark.parametrize(
    ("columns", "head_groups", "padded"), [(13, None, 13), (13, 1, 16), (6, 2, 16), (24, 3, 24), (27, 3, 48)]
)
def test_aligned_linear_pads_head_groups(
    one_process: Any, multiplied: list[int], columns: int, head_groups: int | None, padded: int
) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=12, num_attention_heads=1, use_cpu_initialization=True, perform_initialization=False
    )
    given = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "tp_group": one_process.tp}
    linear, plain = (cls(12, columns, **given) for cls in (AlignedColumnParallelLinear, ColumnParallelLinear))
    linear.head_groups = head_groups
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 12, generator=generator) for n in (5, columns))
    grad = torch.randn(5, padded, generator=generator)
    own = (torch.arange(padded) % (padded // (head_groups or 1))) < columns // (head_groups or 1)

    def run(module: Any, grad: torch.Tensor) -> list[torch.Tensor]:
        with torch.no_grad():
            module.weight.copy_(weight)
        leaf = x.clone().requires_grad_()
        out, _ = module(leaf)
        return [out, *torch.autograd.grad(out, [leaf, module.weight], grad)]

    out, *found = run(linear, grad)
    expected_out, *expected = run(plain, grad[:, own])
    assert out.shape == (5, padded)
    assert not out[:, ~own].any()
    for one, other in zip([out[:, own], *found], [expected_out, *expected], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert multiplied == [padded, columns]
