"""Faults to plant one at a time, each with the tests that must catch it; see `plant_faults.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PlantedFault:
    """Replacement of some text in a source file.

    Attributes:
        name: the fault in words.
        file: source file, from the root of the repository.
        old: text that occurs once in the file.
        new: text that replaces it.
        tests: arguments of pytest; at least one test must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


FAULTS = [
    PlantedFault(
        "state handed to the wrong rank",
        "megatron_ext/parallel/states.py",
        "return torch.stack(initial_states)[group.rank()]",
        "return torch.stack(initial_states)[group.rank() - 1]",
        "tests/distributed/test_handing_on.py",
    ),
    PlantedFault(
        "wrong sign of a state in the context-parallel scan",
        "megatron_ext/parallel/states.py",
        "return summary[..., e:] @ state + summary[..., :e]",
        "return summary[..., :e] - summary[..., e:] @ state",
        "tests/distributed/test_handing_on.py",
    ),
    PlantedFault(
        "convolution rows of the wrong rank",
        "megatron_ext/parallel/states.py",
        "narrow(0, group.rank() * count, count)",
        "narrow(0, 0 * group.rank(), count)",
        "tests/distributed/test_parity.py -k 'mamba or deltanet'",
    ),
    PlantedFault(
        "zigzag pieces exchanged in the wrong order",
        "megatron_ext/parallel/zigzag.py",
        "return group.rank(), 2 * group.size() - 1 - group.rank()",
        "return group.rank(), 2 * group.size() - 2 - group.rank()",
        "tests/distributed/test_exchange.py tests/distributed/test_parity.py -k 'exchange or zigzag or attention'",
    ),
    PlantedFault(
        "gradient of gathered keys not reduced",
        "megatron_ext/parallel/exchange.py",
        "exchange(x_tbnw, _gather_sequence, _reduce_scatter_sequence, group)",
        "exchange(x_tbnw, _gather_sequence, lambda g, of: g.chunk(of.size())[of.rank()], group)",
        "tests/distributed/test_exchange.py",
    ),
    PlantedFault(
        "gradient of a replicated parameter not summed over tensor-parallel ranks",
        "megatron_ext/mixers/core/base.py",
        "return parameter if self.tp_size == 1 else copy_to_group(parameter, self.tp_group)",
        "return parameter",
        "tests/distributed/test_parity.py",
    ),
    PlantedFault(
        "gradient of a shared projection not summed without sequence parallelism",
        "megatron_ext/mixers/core/base.py",
        "return copy_to_group(F.linear(hidden_states, weight), self.tp_group)",
        "return F.linear(hidden_states, weight)",
        "tests/distributed/test_parity.py -k gla",
    ),
    PlantedFault(
        "parameter rows of the wrong heads under tensor parallelism",
        "megatron_ext/mixers/core/base.py",
        "start = part.first_head_group - self.tp_rank * self.num_head_groups_per_rank",
        "start = 0 * part.first_head_group",
        "tests/distributed/test_parity.py",
    ),
    PlantedFault(
        "loss summed over data-parallel ranks only",
        "megatron_ext/model/forward_backward.py",
        "dist.all_reduce(total, group=self.groups.dp_cp)",
        "dist.all_reduce(total, group=self.groups.dp)",
        "tests/distributed/test_parity.py",
    ),
    PlantedFault(
        "context-parallel ranks read the same slice",
        "megatron_ext/data/batches.py",
        "return slice(cp_rank * length // cp_size, (cp_rank + 1) * length // cp_size)",
        "return slice(0, length // cp_size)",
        "tests/data",
    ),
    PlantedFault(
        "data-parallel ranks read the same samples",
        "megatron_ext/data/batches.py",
        "first = step_first_sample + (micro_batch * dp_size + dp_rank) * micro_batch_size",
        "first = step_first_sample + (micro_batch * dp_size + 0 * dp_rank) * micro_batch_size",
        "tests/data",
    ),
    PlantedFault(
        "first label of a document counts",
        "megatron_ext/data/batches.py",
        "    is_first_label[starts] = True\n",
        "    is_first_label[:0] = True\n",
        "tests/data",
    ),
    PlantedFault(
        "recurrent state not decayed",
        "kernels/gated_linear_attention/reference.py",
        "state_bhde = state_bhde * g_bthf[:, t, :, :, None].exp() + written",
        "state_bhde = state_bhde + written",
        "tests/kernels/test_kernel_gated_linear_attention.py",
    ),
    PlantedFault(
        "chosen chunks rank by the lowest product",
        "kernels/top1_chunk/reference.py",
        "return products_bhtnc.amax(dim=-1)",
        "return products_bhtnc.amin(dim=-1)",
        "tests/kernels/test_kernel_top1_chunk.py",
    ),
    PlantedFault(
        "moments lost when an optimizer state is resharded",
        "megatron_ext/optim/state.py",
        "    yield from _row_boxes(last_whole, shape, last_whole * inner, stop)\n",
        "",
        "tests/optim/test_optimizer_state.py tests/checkpoint/test_checkpoint_resharding.py",
    ),
    PlantedFault(
        "weight decay on vectors",
        "megatron_ext/optim/parameter_groups.py",
        'decayed = [p for p in parameters if p.dim() > 1 and not getattr(p, "no_weight_decay", False)]',
        "decayed = [p for p in parameters if p.dim() > 0]",
        "tests/optim tests/distributed/test_zero_parity.py",
    ),
    PlantedFault(
        "checksum of a checkpoint's file not compared",
        "megatron_ext/checkpoint/folder.py",
        "        if found != expected:\n",
        "        if found.size != expected.size:\n",
        "tests/checkpoint",
    ),
    PlantedFault(
        "non-finite losses pass",
        "megatron_ext/training/resilience/guard.py",
        "if not math.isfinite(value):",
        "if math.isinf(value):",
        "tests/training/resilience",
    ),
    PlantedFault(
        "error of one rank swallowed",
        "megatron_ext/parallel/agreement.py",
        "    if failure is not None:\n        raise _error_from_json(*failure)\n",
        "",
        "tests/parallel/test_agreement.py",
    ),
    PlantedFault(
        "decode cache not reordered with the beams",
        "megatron_ext/mixers/core/decode_cache.py",
        "torch.index_select(self.buffer[: self._count], 1, indices_n, out=buffer[: self._count])",
        "buffer[: self._count] = self.buffer[: self._count, :1]",
        "tests/evaluation/test_language_model.py -k test_every_mixer_remembers_under_every_layout",
    ),
    PlantedFault(
        "documents of a packed sample mixed together",
        "megatron_ext/mixers/core/documents.py",
        "rows[start:end] = first + sample + len(pieces) * torch.arange(end - start)",
        "rows[start:end] = first + len(pieces) * torch.arange(end - start)",
        "tests/mixers/test_mixer_documents.py",
    ),
    PlantedFault(
        "path out of a folder accepted",
        "megatron_ext/utils/untrusted_paths.py",
        'if ".." in PurePosixPath(name).parts:',
        'if ".." in name.split(":"):',
        "tests/utils tests/data_prep/test_manifest_checks.py",
    ),
    PlantedFault(
        "shard of a ring pass received from the wrong rank",
        "megatron_ext/parallel/line.py",
        "dist.irecv, next_shard, group=group, group_peer=rank - 1",
        "dist.irecv, next_shard, group=group, group_peer=max(0, rank - 2)",
        "tests/distributed/test_fetching.py tests/distributed/test_exchange.py --timeout 60",
    ),
]
