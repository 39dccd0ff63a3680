"""What cannot run on the nodes at hand; what starts or plans a run there knows how many GPUs they have."""

from __future__ import annotations

from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import UserError


def check_nodes(config: RunConfig, world_size: int, per_node: int) -> None:
    """Refuse what cannot run there.

    Args:
        config: that `rules.check` has passed.
        world_size: processes of the run.
        per_node: processes of a node.

    Raises:
        UserError: a context-parallel group whose ranks read each other's memory lies on several nodes.
    """
    p = config.parallel
    span = p.tensor * p.context
    if p.context_transport != "copy_engine" or p.context == 1 or world_size <= per_node or per_node % span == 0:
        return
    group = f"tensor {p.tensor} * context {p.context} = {span} processes"
    problem, mend = f"do not divide nodes of {per_node}", f"choose nccl, or a tensor * context that divides {per_node}"
    raise UserError("parallel.context_transport", f"copy_engine, and {group} {problem}", mend)
