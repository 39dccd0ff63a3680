"""Differences between the supported versions of megatron-core.

Each difference names the version that brought it. The code tests for the feature, not for the version number, so that
builds from source work, too.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.core.transformer.mlp import MLPSubmodules

SUPPORTED = ">=0.16.1,<0.20"
"""Versions that may be installed; the same range as in pyproject.toml. Versions from 0.17 need Python 3.12."""

TESTED = ("0.16.1", "0.19.2")
"""Versions with which all tests were run."""


def mlp_spec(linear_fc1: type, linear_fc2: type) -> Any:
    """Return the spec of the feed-forward network of a layer.

    Since 0.18 it is a function that builds the network. A `ModuleSpec` is still accepted, but the layer replaces it in
    place and logs a warning for each layer.
    """
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    submodules = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    if hasattr(MLP, "as_mlp_submodule"):
        return functools.partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def mlp_submodules(spec: Any) -> MLPSubmodules:
    """Return the linear layers of a spec that `mlp_spec` returned."""
    return spec.keywords["submodules"] if isinstance(spec, functools.partial) else spec.submodules
