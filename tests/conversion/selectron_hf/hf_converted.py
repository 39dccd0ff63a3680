"""Selectron models with random weights, and their conversion to the format of transformers."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ext.config.derive import derive
from megatron_ext.config.schema import DataConfig, ModelConfig, RunConfig, TrainingConfig
from megatron_ext.conversion.core.family import SavedModel
from megatron_ext.conversion.huggingface.families.selectron import Selectron
from megatron_ext.model.build import build_model
from megatron_ext.model.shape import model_shape
from megatron_ext.platform.device import Platform

CPU = Platform(torch.device("cpu"), "gloo")
VOCABULARY, LENGTH = 90, 72


@dataclass
class Converted:
    """Selectron model, and the same model as transformers loads it.

    Attributes:
        saved: description of the model.
        ours: Megatron model, fp32.
        folder: folder in the format of transformers.
        theirs: model that transformers loads from the folder.
    """

    saved: SavedModel
    ours: Any
    folder: Path
    theirs: Any

    def our_logits(self, tokens_bt: Tensor) -> Tensor:
        positions_bt = torch.arange(tokens_bt.shape[1]).expand_as(tokens_bt)
        with torch.no_grad():
            return self.ours(tokens_bt, positions_bt, attention_mask=None)[..., :VOCABULARY]


def convert_model(
    groups: Any, root: Path, pattern: str, mixers: dict[str, Any] | None = None, **sizes: Any
) -> Converted:
    """Build a Selectron model with random weights, write it in the format of transformers and load it."""
    from transformers import AutoModelForCausalLM

    fields = {"hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, **sizes}
    model = ModelConfig(pattern=pattern, **fields)
    data, training = DataConfig(path="none", seq_length=LENGTH), TrainingConfig(precision="fp32")
    config = derive(RunConfig(data=data, model=model, mixers=mixers or {}, training=training))
    shape = model_shape(config, CPU, VOCABULARY)
    (ours,) = build_model(shape, CPU, groups, seed=3)
    _draw(ours)
    saved = SavedModel(
        model=config.model,
        layers=tuple(shape.mixers),
        mixers=dict(shape.mixer_configs),
        vocab_size=VOCABULARY,
        seq_length=LENGTH,
    )
    folder = _write_folder(saved, ours, root / "model")
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    return Converted(saved, ours.eval(), folder, theirs)


@torch.no_grad()
def _draw(model: torch.nn.Module) -> None:
    """Draw weights large enough that every parameter matters. Norm weights stay near one to bound the activations."""
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(1 + 0.2 * drawn if name.endswith("norm.weight") else 0.25 * drawn)


def checkpoint_tensors(model: Any) -> dict[str, Tensor]:
    """Return the tensors of a one-process model as in its checkpoint, without vocabulary padding."""
    tensors = {}
    for part in model.sharded_state_dict().values():
        if isinstance(getattr(part, "data", None), Tensor):
            is_padded = part.key.endswith(("word_embeddings.weight", "output_layer.weight"))
            tensors[part.key] = part.data.detach().clone()[: VOCABULARY if is_padded else None]
    return tensors


def _write_folder(saved: SavedModel, ours: Any, folder: Path) -> Path:
    family, stored = Selectron(), checkpoint_tensors(ours)
    tensors = {}
    for rule in family.rules(saved):
        tensors |= zip(rule.theirs, rule.to_theirs([stored[name] for name in rule.ours]), strict=True)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = family.config(saved) | {"dtype": "float32", "eos_token_id": VOCABULARY - 1}
    (folder / "config.json").write_text(json.dumps(config))
    for file in family.code:
        shutil.copy(file, folder)
    return folder
