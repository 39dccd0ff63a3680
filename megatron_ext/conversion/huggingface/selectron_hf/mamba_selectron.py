"""Mamba and Mamba-2 mixers.

Shape suffixes: b batch, t position, c channel, u head group (a head; in Mamba-2 a group of heads), w width, n state
dim, e value dim.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from .cache_selectron import EmptyHistory
from .mixer_selectron import Mixer, Positions, full_precision, short_convolution, split_head_groups
from .stateful_selectron import scan
from .states_selectron import selective_scan


class Mamba(Mixer):
    """Mamba: a diagonal recurrent state per channel (Gu, Dao 2023, arXiv 2312.00752).

    The rows of the input projection are, for each head, [x | gate z].
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        width, size = self.head_dim * self.settings.expand, self.settings.state_size
        rank = self.settings.dt_rank or -(-self.hidden_size // 16)
        self.width, self.split_sizes = width, [rank, size, size]
        self.in_proj = self.linear(self.hidden_size, self.num_heads * 2 * width)
        self.out_proj = self.linear(self.num_heads * width, self.hidden_size)
        self.conv_weight = self.parameter(self.num_heads, width, self.settings.conv_kernel_size)
        self.conv_bias = self.parameter(self.num_heads, width)
        self.x_proj = self.parameter(self.num_heads, sum(self.split_sizes), width)
        self.dt_proj = self.parameter(self.num_heads, width, rank)
        self.dt_bias = self.parameter(self.num_heads, width)
        self.A_log = self.parameter(self.num_heads, width, size)
        self.D = self.parameter(self.num_heads, width)

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        x, z = split_head_groups(self.in_proj(x_bth), self.num_heads, [self.width] * 2)
        previous = history.previous_rows("convolution", x, self.conv_weight.shape[-1] - 1)
        x_btc = short_convolution(x, previous, self.conv_weight, self.conv_bias).to(x.dtype).flatten(2)
        dt_btc, B_btn, C_btn = self._project_inputs(x_btc)
        A_cn, D_c = -self.A_log.float().exp().flatten(0, 1), self.D.float().flatten()
        y_btc, state = selective_scan(x_btc, dt_btc, A_cn, B_btn, C_btn, history.state("state"))
        history.store_state("state", state)
        y_btc = (y_btc + D_c * x_btc.float()).to(x.dtype)
        projected: Tensor = self.out_proj((y_btc.float() * F.silu(z.flatten(2).float())).to(x.dtype))
        return projected

    def _project_inputs(self, x_btc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step sizes [b, t, c], B and C [b, t, n] of each token, fp32.

        They are projections of the channels of all heads.
        """
        low_btr, B_btn, C_btn = linear_to_fp32(x_btc, self.x_proj.transpose(0, 1).flatten(1)).split(
            self.split_sizes, -1
        )
        logits_btc = linear_to_fp32(low_btr.to(x_btc.dtype), self.dt_proj.flatten(0, 1))
        return F.softplus(logits_btc + self.dt_bias.float().flatten()), B_btn, C_btn


@full_precision
def linear_to_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product of features and a weight, accumulated and returned in fp32."""
    return F.linear(x.float(), weight.float())


class Mamba2(Mixer):
    """Mamba-2: a recurrent state per head (Dao, Gu 2024, arXiv 2405.21060). The heads of a group share B and C.

    The rows of the input projection are, for each group, [x of its heads | B | C | gate z of its heads | step of its
    heads].
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        settings, heads, head_groups = self.settings, self.num_heads // self.num_groups, self.num_groups
        self.heads, self.value_dim = heads, self.head_dim * settings.expand
        width, size = heads * self.value_dim, settings.state_size
        self.split_sizes, self.num_step_rows = [width, size, size], heads if settings.decay == "data_dependent" else 0
        self.in_proj = self.linear(self.hidden_size, head_groups * (2 * width + 2 * size + self.num_step_rows))
        self.out_proj = self.linear(head_groups * width, self.hidden_size)
        if settings.convolution:
            self.conv_weight = self.parameter(head_groups, sum(self.split_sizes), settings.conv_kernel_size)
            self.conv_bias = self.parameter(head_groups, sum(self.split_sizes))
        if settings.decay != "none":
            self.log_decay = self.parameter(head_groups, heads)
            self.step_bias = self.parameter(head_groups, heads)
        self.skip = self.parameter(head_groups, heads)
        if settings.group_norm:
            self.group_norm_weight = self.parameter(head_groups, width)

    def forward(self, x_bth: Tensor, history: EmptyHistory, positions: Positions) -> Tensor:
        """Implement `Mixer.forward`."""
        widths = [sum(self.split_sizes), self.split_sizes[0], self.num_step_rows]
        xbc, gate, step = split_head_groups(self.in_proj(x_bth), self.num_groups, widths)
        x_btuw, B_btun, C_btun = self._convolve(xbc, history).split(self.split_sizes, -1)
        x_btuhe = x_btuw.unflatten(-1, (self.heads, self.value_dim))
        y = self._read_states(x_btuhe, B_btun, C_btun, step, history).to(x_bth.dtype)
        y = y.float() + self.skip.float()[..., None] * x_btuhe.float()
        y_btuw = y.flatten(-2) * F.silu(gate.float())
        if self.settings.group_norm:
            y_btuw = F.rms_norm(y_btuw, y_btuw.shape[-1:], eps=self.epsilon) * self.group_norm_weight.float()
        projected: Tensor = self.out_proj(y_btuw.to(x_bth.dtype).flatten(2))
        return projected

    def _convolve(self, xbc: Tensor, history: EmptyHistory) -> Tensor:
        if not self.settings.convolution:
            return F.silu(xbc)
        previous = history.previous_rows("convolution", xbc, self.conv_weight.shape[-1] - 1)
        return short_convolution(xbc, previous, self.conv_weight, self.conv_bias).to(xbc.dtype)

    def _read_states(
        self, x_btuhe: Tensor, B_btun: Tensor, C_btun: Tensor, step: Tensor, history: EmptyHistory
    ) -> Tensor:
        """Return the output of each head's state, [b, t, u, h, e]: S <- e^g S + B (step x)^T;  y = S^T C."""
        k, q = (y.repeat_interleave(self.heads, 2) for y in (B_btun, C_btun))
        values, decay = x_btuhe, None
        if self.settings.decay != "none":
            bias = self.step_bias.float()
            steps = F.softplus(bias + step.float() if self.num_step_rows else bias)
            values = (steps[..., None] * x_btuhe.float()).to(x_btuhe.dtype)
            log_decay = -self.log_decay.float().exp() * steps
            decay = log_decay.expand(x_btuhe.shape[:4]).flatten(2)[..., None]
        return scan(history, q, k, values.flatten(2, 3), decay, 1.0).unflatten(2, (-1, self.heads))
