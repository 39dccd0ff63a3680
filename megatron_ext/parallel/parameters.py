"""Parameters of mixers, and initial weights that do not depend on the parallel layout.

The initial value of a weight is a function of the seed and of the weight's global name only. The whole weight is drawn
on the CPU and then sharded. Runs under different layouts, on CPUs or GPUs, thus start from the same model, so that
their loss curves can be compared.
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
"""Function that fills a whole, unsharded fp32 CPU tensor in place.

The function must not reference the module. The parameter references its initializer, and autograd references the
parameter, so the garbage collector would never free the reference cycle.
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
    """Create an uninitialised parameter of a mixer on the current device.

    Args:
        shape: shape of this rank's shard.
        initializer: initializer of the whole parameter, used by `initialize_model`.
        dtype: dtype of the parameter.
        split_over: tensor-parallel group over which dim 0 is sharded. None: the parameter is replicated, and its
            gradient must be summed over tensor-parallel ranks that process different heads (see `Mixer.replicated`).
        weight_decay: False: the parameter is excluded from weight decay, as every vector is.
        in_fp32: True if the forward pass uses the parameter in fp32 whatever `dtype` is; see `fp32_values`.
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
    """Iterate over the parameters of a model chunk with their names in the whole model, on any pipeline stage."""
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if name.startswith("decoder.layers."):
            parts[2] = str(model.decoder.layers[int(parts[2])].layer_number - 1)
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            parts = ["embedding", "word_embeddings", "weight"]
        yield ".".join(parts), parameter


@dataclass(frozen=True)
class ParameterCount:
    """Number of parameters of a model as it is trained, including the padding rows of the vocabulary.

    Attributes:
        parameters: number of all parameters; a shared weight counts once.
        embedding_parameters: number of parameters of the word and position embeddings at the input.
        output_layer_parameters: number of parameters of the output layer; 0 if it shares the embedding's weight.
    """

    parameters: int
    embedding_parameters: int
    output_layer_parameters: int


def count_parameters(chunks: Iterable[torch.nn.Module], tp_size: int) -> ParameterCount:
    """Count the parameters of a pipeline stage's model chunks, over all `tp_size` tensor-parallel ranks."""
    total = embedding = output = 0
    for model in (module for chunk in chunks for module in chunk.modules() if isinstance(module, GPTModel)):
        for name, parameter in global_parameters(model):
            split = getattr(parameter, "tensor_model_parallel", False)
            count = parameter.numel() * (tp_size if split else 1)
            if name.startswith("embedding."):
                if not model.pre_process:  # copy of the first stage's embedding
                    continue
                embedding += count
            elif name.startswith("output_layer."):
                output += count
            total += count
    return ParameterCount(total, embedding, output)


def initialize_model(chunks: Iterable[GPTModel], seed: int, tp_group: ProcessGroup) -> None:
    """Set every parameter of this rank to its initial value (see the module's docstring).

    Norm weights are 1 and norm biases 0. Matrices are normal with the configuration's standard deviation. For the
    matrices that write to the residual stream, the standard deviation is divided by the square root of the number of
    these matrices (GPT-2). A mixer's own parameters use their `initializer`.

    Args:
        chunks: model chunks of this rank, not yet wrapped.
        seed: seed of the whole model.
        tp_group: tensor-parallel group.
    """
    # Each parameter has its own generator, so that threads can draw parameters concurrently. The number of threads is
    # limited, because each keeps a whole parameter in fp32.
    with ThreadPoolExecutor(min(_AT_ONCE, torch.get_num_threads())) as threads:
        drawn = [
            threads.submit(_initialize, name, parameter, model.config, seed, tp_group)
            for model in chunks
            for name, parameter in global_parameters(model)
        ]
        for future in drawn:
            future.result()


def initialize_mixer(mixer: MegatronModule, seed: int, tp_group: ProcessGroup) -> None:
    """Set every parameter of a stand-alone mixer to its initial value, by the rules of `initialize_model`."""
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
    """Return a CPU generator whose stream is a function of `identity` only, in every process and on every machine."""
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
    """Fill a tensor with ones."""
    whole.fill_(1.0)


def zeros(whole: Tensor, _: torch.Generator) -> None:
    """Fill a tensor with zeros."""
    whole.zero_()


def constant(value: float) -> Initializer:
    """Return an initializer that sets all elements to one value."""

    def fill(whole: Tensor, _: torch.Generator) -> None:
        whole.fill_(value)

    return fill


def by_channel(values: Callable[[Tensor], Tensor]) -> Initializer:
    """Return an initializer that applies a formula to the channel index.

    Args:
        values: maps the indices 0, 1, ... (float64) of the whole tensor's elements to their initial values.
    """

    def fill(whole: Tensor, _: torch.Generator) -> None:
        whole.copy_(values(torch.arange(whole.numel(), dtype=torch.float64)).view_as(whole))

    return fill


def normal(std: float) -> Initializer:
    """Return an initializer with normal values of mean 0 and standard deviation `std`."""

    def fill(whole: Tensor, generator: torch.Generator) -> None:
        whole.normal_(0.0, std, generator=generator)

    return fill


def uniform_within(bound: float) -> Initializer:
    """Return an initializer with values uniform in [-bound, bound]."""

    def fill(whole: Tensor, generator: torch.Generator) -> None:
        whole.uniform_(-bound, bound, generator=generator)

    return fill


def _own_part_of_halves(whole: Tensor, tp_group: ProcessGroup) -> Tensor:
    """Shard SwiGLU's first matrix [gate; value] as Megatron does: each rank gets a shard of both halves."""
    return torch.cat([half.chunk(tp_group.size())[tp_group.rank()] for half in whole.chunk(2)])
