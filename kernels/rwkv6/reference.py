"""State update of RWKV-6 in plain torch: recurrent (the definition) and chunked (equivalent and faster).

Peng et al. 2024, "Eagle and Finch" (arXiv 2404.05892), the wkv of Finch's time mixing. The state S is [dk, dv] per
head. r_t reads the state before it decays and before token t is added:

    o_t = scale * (S + diag(u) k_t v_t^T)^T r_t;  S <- diag(exp(g_t)) S + k_t v_t^T

Suffixes: b batch, h head, t position, d key dim, e value dim.
"""

import torch
from torch import Tensor

from kernels.gated_linear_attention.reference import chunked as linear_attention


def recurrent(
    r_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bthd: Tensor, u_hd: Tensor, *, scale: float, state_bhde: Tensor
) -> tuple[Tensor, Tensor]:
    """Iterate over the tokens.

    Args:
        r_bthd: receptances [b, t, h, dk]. All arguments have one dtype, fp32 or float64.
        k_bthd: keys [b, t, h, dk].
        v_bthe: values [b, t, h, dv].
        g_bthd: log decay [b, t, h, dk], at most 0.
        u_hd: bonus of the current token [h, dk].
        scale: factor on r.
        state_bhde: state before the first token [b, h, dk, dv].

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    outputs = []
    for t in range(r_bthd.shape[1]):
        written = k_bthd[:, t, :, :, None] * v_bthe[:, t, :, None, :]
        seen = state_bhde + u_hd[:, :, None] * written
        outputs.append(torch.einsum("bhd,bhde->bhe", r_bthd[:, t] * scale, seen))
        state_bhde = state_bhde * g_bthd[:, t, :, :, None].exp() + written
    return torch.stack(outputs, dim=1), state_bhde


def chunked(
    r_bthd: Tensor, k_bthd: Tensor, v_bthe: Tensor, g_bthd: Tensor, u_hd: Tensor, *, scale: float, state_bhde: Tensor
) -> tuple[Tensor, Tensor]:
    """Scan over chunks of 16 tokens, by gated linear attention with a decay per key feature.

    Gated linear attention reads S after token t is added, so its query t is r_{t+1} here.

    Args:
        r_bthd: receptances. Shapes and dtypes are those of `recurrent`.
        k_bthd: keys.
        v_bthe: values.
        g_bthd: log decay.
        u_hd: bonus of the current token.
        scale: factor on r.
        state_bhde: state before the first token.

    Returns:
        o [b, t, h, dv] and the state after the last token.
    """
    r_bthd = r_bthd * scale
    next_r = torch.cat([r_bthd[:, 1:], torch.zeros_like(r_bthd[:, :1])], dim=1)
    past, last = linear_attention(next_r, k_bthd, v_bthe, g_bthd, scale=1.0, state_bhde=state_bhde)
    first = torch.einsum("bhd,bhde->bhe", r_bthd[:, 0], state_bhde)
    past = torch.cat([first[:, None], past[:, :-1]], dim=1)
    present = (r_bthd * u_hd * k_bthd).sum(dim=-1, keepdim=True) * v_bthe
    return past + present, last
