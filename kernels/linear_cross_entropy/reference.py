"""Definition of the op: all logits at once and torch's cross entropy."""

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(hidden_nh: Tensor, weight_vh: Tensor, label_n: Tensor) -> Tensor:
    """Compute losses [n] from flat inputs. Arguments as in `interface.linear_cross_entropy`."""
    logits_nv = F.linear(hidden_nh, weight_vh)
    return F.cross_entropy(logits_nv.to(torch.promote_types(logits_nv.dtype, torch.float32)), label_n, reduction="none")
