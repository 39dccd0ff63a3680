"""Model code for transformers that an exported checkpoint contains beside its weights.

The files are copied unchanged, so they import only torch, transformers and each other. Imports among them are relative,
which is what transformers resolves for remote code. All tensors are batch first. The rest of the package does not
import this code at module level, because transformers is an optional dependency.
"""
