"""The gated delta rule (Gated DeltaNet)."""

from kernels.gated_delta_rule.interface import gated_delta_rule

__all__ = ["gated_delta_rule"]
