"""Models whose weights are read on use, compared with models in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megatron_ext.conversion.core import staged


class Model(nn.Module):
    """Model that uses weights in every way that a library's model does."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.norm = nn.RMSNorm(8)
        self.first, self.second = nn.Linear(8, 10), nn.Linear(10, 8, bias=False)
        self.scale, self.mixing = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(2, 8, 8))
        self.output = nn.Linear(8, 12, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.embedding(tokens))
        assert self.scale.device == x.device
        assert not self.scale.is_meta
        assert (self.scale.shape, self.scale.dim(), self.scale.dtype) == ((8,), 1, torch.float32)
        x = torch.matmul(self.first(x) * self.first.bias.exp(), self.second.weight.t())
        x = x @ self.second.weight[:, :8].T + torch.einsum("...i,hij->...j", x, self.mixing.float())
        return self.output(F.silu(x * self.scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_equal_those_of_a_model_in_memory(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_ELEMENTS", 24)  # three rows of eight
    torch.manual_seed(2)
    model, tokens = Model().to(dtype), torch.arange(12).view(2, 6)
    weights = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        expected = model.float()(tokens)
        with staged.on_meta():
            empty = Model()
        before = dict(empty.named_parameters())
        assert all(parameter.is_meta for parameter in before.values())
        assert empty.output.weight is empty.embedding.weight
        read: list[str] = []
        with staged.read_on_use(empty, lambda name: read.append(name) or weights[name]):
            assert not read
            found = empty(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert set(read) == set(weights)
    assert {name: id(p) for name, p in empty.named_parameters()} == {name: id(p) for name, p in before.items()}


def test_a_matrix_is_converted_to_fp32_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "CHUNK_ELEMENTS", 24)
    rows: list[int] = []
    linear = F.linear
    monkeypatch.setattr(staged.F, "linear", lambda x, chunk: rows.append(len(chunk)) or linear(x, chunk))
    stored = torch.randn(10, 8).bfloat16()
    weight = staged.DiskWeight.from_read(torch.empty(10, 8, device="meta"), lambda: stored)
    x = torch.randn(2, 8)
    torch.testing.assert_close(x @ weight.t(), x @ stored.float().t(), rtol=1e-6, atol=1e-6)
    assert rows == [3, 3, 3, 1]
