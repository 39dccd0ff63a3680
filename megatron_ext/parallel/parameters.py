"""Parameters of our own modules, and initial weights that do not depend on the layout.

Every weight starts from values that are a function of (seed, its global name) alone: drawn whole on the CPU, then cut
for this rank. One process, TP2, PP2 or a GPU start from the same model, so their loss curves can be compared.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.parallel.fp32_values import keep_fp32_values, set_values

Initializer = Callable[[Tensor, torch.Generator], None]
"""Fills a whole, unsplit fp32 CPU tensor in place.

It must not know the module: a circle through a parameter, which autograd holds too, is never freed, nor what is in it.
"""

_AT_ONCE = 8


def new_parameter(
    shape: tuple[int, ...],
    initializer: Initializer,
    *,
    dtype: torch.dtype,
    split_over: ProcessGroup | None = None,
    weight_decay: bool = True,
    in_fp32: bool = False,
) -> torch.nn.Parameter:
    """An uninitialised parameter of a mixer, on the current device.

    Args:
        shape: of this rank's part.
        initializer: of the whole parameter; used by `initialize_model`.
        dtype: of the parameter.
        split_over: tensor-parallel group over which dim 0 is split; None: every rank has the whole parameter, and its
            gradient must be summed over tensor-parallel ranks where they see different heads (see `Mixer.replicated`).
        weight_decay: False: the optimizer leaves it out, as it does every vector.
        in_fp32: whether the forward pass takes it in fp32 whatever its dtype; see `fp32_values`.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    parameter = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
    parameter.initializer = initializer  # type: ignore[attr-defined]
    parameter.no_weight_decay = not weight_decay  # type: ignore[attr-defined]
    if in_fp32:
        keep_fp32_values(parameter)
    if split_over is not None:
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
    return parameter


def global_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a model chunk by the name they have in the whole model, whatever stage holds them."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            parts = ["embedding", "word_embeddings", "weight"]
        yield ".".join(parts), parameter


@dataclass(frozen=True)
class ParameterCount:
    """How many parameters a model has, as it is trained: with the rows that fill up the vocabulary.

    Attributes:
        parameters: all of them; a weight that is shared counts once.
        embedding_parameters: those of the input's word and position embeddings among them.
        output_layer_parameters: those of the output layer; 0 where it shares the embedding's.
    """

    parameters: int
    embedding_parameters: int
    output_layer_parameters: int


def count_parameters(chunks: Iterable[torch.nn.Module], tp_size: int) -> ParameterCount:
    """Parameters of a stage's chunks, wrapped or not, with the parts of all `tp_size` tensor-parallel ranks."""
    total = embedding = output = 0
    for model in (module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)):
        for name, parameter in global_parameters(model):
            split = getattr(parameter, "tensor_model_parallel", False)
            count = parameter.numel() * (tp_size if split else 1)
            if name.startswith("embedding."):
                if not model.pre_process:  # the last stage's copy of the first one's
                    continue
                embedding += count
            elif name.startswith("output_layer."):
                output += count
            total += count
    return ParameterCount(total, embedding, output)


def initialize_model(chunks: Iterable[GPTModel], seed: int, tp_group: ProcessGroup) -> None:
    """Give every parameter of this rank its initial value (see the module's docstring).

    Norm weights are 1, their biases 0; matrices are normal with the configuration's standard deviation, those that
    write into the residual stream divided by the square root of their number (GPT-2); a mixer's own parameters follow
    their `initializer`.

    Args:
        chunks: model chunks of this rank, not yet wrapped.
        seed: of the whole model.
        tp_group: tensor-parallel group.
    """
    # Each has a generator of its own, so they are drawn side by side; few at once, as they are whole and in fp32.
    with ThreadPoolExecutor(min(_AT_ONCE, torch.get_num_threads())) as threads:
        drawn = [
            threads.submit(_initialize, name, parameter, model.config, seed, tp_group)
            for model in chunks
            for name, parameter in global_parameters(model)
        ]
        for one in drawn:
            one.result()


def initialize_mixer(mixer: MegatronModule, seed: int, tp_group: ProcessGroup) -> None:
    """Give every parameter of a mixer that stands alone its initial value, by the rules of `initialize_model`."""
    for name, parameter in mixer.named_parameters():
        _initialize(name, parameter, mixer.config, seed, tp_group)


def _initialize(name: str, parameter: Tensor, config: TransformerConfig, seed: int, tp_group: ProcessGroup) -> None:
    split = tp_group.size() > 1 and getattr(parameter, "tensor_model_parallel", False)
    shape = list(parameter.shape)
    if split:
        shape[parameter.partition_dim] *= tp_group.size()  # type: ignore[attr-defined]
    whole = torch.empty(shape, dtype=torch.float32)
    initializer = getattr(parameter, "initializer", None) or _default_initializer(name, config)
    initializer(whole, generator_for(seed, name))
    if not split:
        part = whole
    elif config.gated_linear_unit and name.endswith("linear_fc1.weight"):
        part = _own_part_of_halves(whole, tp_group)
    else:
        part = whole.chunk(tp_group.size(), parameter.partition_dim)[tp_group.rank()]  # type: ignore[attr-defined]
    set_values(parameter, part)


def generator_for(*identity: int | str) -> torch.Generator:
    """A CPU generator whose stream is a function of `identity` alone, in every process and on every machine."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _default_initializer(name: str, config: TransformerConfig) -> Initializer:
    if name.endswith("norm.weight"):
        return ones
    if name.endswith("norm.bias"):
        return zeros
    std = config.init_method_std
    if name.endswith(("out_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(getattr(config, "branches_per_layer", 2) * config.num_layers)
    return normal(std)


def ones(whole: Tensor, _: torch.Generator) -> None:
    """All ones."""
    whole.fill_(1.0)


def zeros(whole: Tensor, _: torch.Generator) -> None:
    """All zeros."""
    whole.zero_()


def constant(value: float) -> Initializer:
    """One value everywhere."""

    def fill(whole: Tensor, _: torch.Generator) -> None:
        whole.fill_(value)

    return fill


def by_channel(values: Callable[[Tensor], Tensor]) -> Initializer:
    """A formula of the channel.

    Args:
        values: from 0, 1, ... (float64), the numbers of the whole tensor's elements, to what these begin with.
    """

    def fill(whole: Tensor, _: torch.Generator) -> None:
        whole.copy_(values(torch.arange(whole.numel(), dtype=torch.float64)).view_as(whole))

    return fill


def normal(std: float) -> Initializer:
    """Normal values of mean 0."""

    def fill(whole: Tensor, generator: torch.Generator) -> None:
        whole.normal_(0.0, std, generator=generator)

    return fill


def uniform_within(bound: float) -> Initializer:
    """Uniform values of mean 0, at most `bound` in size."""

    def fill(whole: Tensor, generator: torch.Generator) -> None:
        whole.uniform_(-bound, bound, generator=generator)

    return fill


def _own_part_of_halves(whole: Tensor, tp_group: ProcessGroup) -> Tensor:
    """SwiGLU's first matrix is [gate; value], and Megatron gives each tensor-parallel rank a part of both."""
    return torch.cat([half.chunk(tp_group.size())[tp_group.rank()] for half in whole.chunk(2)])
