"""The projection with rows of zeros behind its weight gives what the plain one gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, layers
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_ext.parallel.aligned_linear import AlignedColumnParallelLinear


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each weight that Megatron multiplies with."""
    rows: list[int] = []
    apply = layers.LinearWithGradAccumulationAndAsyncCommunication.apply

    def counted(x: Any, weight: Any, *args: Any) -> Any:
        rows.append(len(weight))
        return apply(x, weight, *args)

    monkeypatch.setattr(layers.LinearWithGradAccumulationAndAsyncCommunication, "apply", counted)
    return rows


@pytest.mark.parametrize(("columns", "padded"), [(16, 16), (13, 16), (1, 8), (24, 24)])
def test_it_is_the_plain_linear(one_process: Any, multiplied: list[int], columns: int, padded: int) -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=12, num_attention_heads=1, use_cpu_initialization=True, perform_initialization=False
    )
    given = {"config": config, "init_method": torch.nn.init.normal_, "bias": False, "tp_group": one_process.tp}
    linear, plain = (cls(12, columns, **given) for cls in (AlignedColumnParallelLinear, ColumnParallelLinear))
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(n, 12, generator=generator) for n in (5, columns))
    grad = torch.randn(5, columns, generator=generator)

    def run(module: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            module.weight.copy_(weight)
        own = x.clone().requires_grad_()
        out, _ = module(own)
        return [out, *torch.autograd.grad(out, [own, module.weight], grad)]

    for found, expected in zip(run(linear), run(plain), strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert multiplied == [padded, columns]
