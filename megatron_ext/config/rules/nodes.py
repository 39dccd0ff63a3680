"""Rule for the nodes of a cluster.

Code that starts or plans a run calls it, because it has the number of GPUs per node.
"""

from __future__ import annotations

from megatron_ext.config.schema import RunConfig
from megatron_ext.utils.errors import UserError


def check_nodes(config: RunConfig, world_size: int, per_node: int) -> None:
    """Refuse a configuration that cannot run on nodes of this size.

    Args:
        config: a configuration that `rules.check` accepts.
        world_size: processes of the run.
        per_node: processes per node.

    Raises:
        UserError: a context-parallel group with the copy_engine transport spans several nodes.
    """
    p = config.parallel
    span = p.tensor * p.context
    if p.context_transport != "copy_engine" or p.context == 1 or world_size <= per_node or per_node % span == 0:
        return
    group = f"tensor {p.tensor} * context {p.context} = {span} processes"
    problem, hint = f"do not divide nodes of {per_node}", f"choose nccl, or a tensor * context that divides {per_node}"
    raise UserError("parallel.context_transport", f"copy_engine, and {group} {problem}", hint)
