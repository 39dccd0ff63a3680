"""Use of a model in transformers: generation, saving, training, and refused options."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hf_cases import HYBRID, HYBRID_MIXERS
from hf_converted import VOCABULARY, Converted
from safetensors.torch import load_file
from torch import Tensor

from megatron_ext.conversion.huggingface.families.selectron import Selectron
from megatron_ext.evaluation.decoding import decoding
from megatron_ext.evaluation.generation import generate, greedy

END = VOCABULARY - 1


@pytest.fixture(scope="module")
def hybrid(convert: Callable[..., Converted]) -> Converted:
    return convert(HYBRID, HYBRID_MIXERS, tie_embeddings=True)


@pytest.fixture(scope="module")
def pattern(convert: Callable[..., Converted]) -> Converted:
    return convert("(top1_chunk*3,attention)*2", {"top1_chunk": {"chunk_size": 8}})


def _generated(model: Converted, prompt_t: Tensor, **options: Any) -> list[int]:
    found = model.theirs.generate(prompt_t[None], do_sample=False, pad_token_id=END, **options)[0, len(prompt_t) :]
    return found.tolist()


@pytest.mark.parametrize("name", ["hybrid", "pattern"])
def test_greedy_generation_equals_ours(request: pytest.FixtureRequest, tokens: Tensor, name: str) -> None:
    model: Converted = request.getfixturevalue(name)
    for row in tokens:
        prompt = row[:20]
        with decoding(model.ours) as decoder:
            options: dict[str, Any] = {"vocab_size": VOCABULARY, "max_tokens": 25, "end": END, "choose": greedy}
            ours = list(generate(decoder, prompt, **options))
        theirs = _generated(model, prompt, max_new_tokens=25)
        assert theirs == (ours if len(ours) == 25 else [*ours, END])


def test_sampling_and_beam_search_are_the_same_without_a_cache(hybrid: Converted, tokens: Tensor) -> None:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 10, "pad_token_id": END, "eos_token_id": None}
    for generation_options in (
        {"num_beams": 3, "do_sample": False, "num_return_sequences": 2},
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "num_return_sequences": 2},
    ):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(5)
            found.append(hybrid.theirs.generate(tokens[:, :12], **options, **generation_options, use_cache=use_cache))
        assert torch.equal(*found)
        assert found[0].shape == (4, 22)


def test_generation_continues_from_a_cache(hybrid: Converted, tokens: Tensor) -> None:
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": END, "eos_token_id": None, "max_new_tokens": 6}

    def continue_conversation(conversation: Tensor, **more: Any) -> Any:
        # Without a mask, transformers would treat each generated pad token as padding.
        mask = torch.ones_like(conversation)
        return hybrid.theirs.generate(
            conversation, attention_mask=mask, return_dict_in_generate=True, **options, **more
        )

    first = continue_conversation(tokens[:, :10])
    conversation = torch.cat([first.sequences, tokens[:, 10:15]], 1)
    second = continue_conversation(conversation, past_key_values=first.past_key_values)
    assert torch.equal(second.sequences, continue_conversation(conversation).sequences)


def test_embeddings_replace_tokens(hybrid: Converted, tokens: Tensor) -> None:
    embeddings = hybrid.theirs.get_input_embeddings()(tokens)
    with torch.no_grad():
        output = hybrid.theirs(inputs_embeds=embeddings, output_hidden_states=True, logits_to_keep=3, return_dict=False)
        logits, _cache, states = output
        assert torch.equal(logits, hybrid.theirs(tokens).logits[:, -3:])
    assert [list(state.shape) for state in states] == [[*tokens.shape, 32]] * (len(hybrid.saved.layers) + 1)
    assert torch.equal(hybrid.theirs.output_layer(states[-1])[:, -3:], logits)
    assert hybrid.theirs(tokens).hidden_states is None


@pytest.mark.parametrize("name", ["hybrid", "pattern"])
def test_a_saved_model_is_the_same(request: pytest.FixtureRequest, tmp_path: Any, tokens: Tensor, name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model: Converted = request.getfixturevalue(name)
    model.theirs.save_pretrained(tmp_path / "saved")
    for file in Selectron().code:
        assert (tmp_path / "saved" / file.name).read_bytes() == file.read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (model.folder, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert Selectron().saved_model(config) == model.saved
    assert config["eos_token_id"] == END
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert AutoConfig.from_pretrained(tmp_path / "saved", trust_remote_code=True).num_hidden_layers == len(
        model.saved.layers
    )
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model.theirs(tokens).logits)


def _gradients(model: Converted, tokens_bt: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.theirs.zero_grad()
    loss = model.theirs(tokens_bt, labels=tokens_bt, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.theirs.named_parameters()}


@pytest.mark.parametrize(
    ("layers", "mixers"),
    [
        (HYBRID, HYBRID_MIXERS),
        ("top1_element,mamba2,rwkv6,gla", {}),
        ("top1_element,based,retnet,deltanet", {"top1_element": {"estimator": "selected"}}),
    ],
)
def test_gradients_equal_ours(
    convert: Callable[..., Converted], tokens: Tensor, layers: str, mixers: dict[str, Any]
) -> None:
    model = convert(layers, mixers)
    loss, found = _gradients(model, tokens)
    positions = torch.arange(tokens.shape[1] - 1).expand(2, -1)
    ours = model.ours(tokens[:, :-1], positions, attention_mask=None)[..., :VOCABULARY]
    expected = torch.nn.functional.cross_entropy(ours.flatten(0, 1), tokens[:, 1:].flatten())
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.ours.named_parameters():
        is_padded = name.endswith(("word_embeddings.weight", "output_layer.weight"))
        gradient = parameter.grad[: VOCABULARY if is_padded else None]
        tolerance = 1e-4 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=tolerance, msg=name)


def test_recomputed_gradients_are_the_same(hybrid: Converted, tokens: Tensor) -> None:
    _, expected = _gradients(hybrid, tokens)
    hybrid.theirs.gradient_checkpointing_enable()
    hybrid.theirs.train()
    try:
        _, found = _gradients(hybrid, tokens)
        with pytest.raises(ValueError, match="set use_cache=False"):
            hybrid.theirs(tokens, use_cache=True)
    finally:
        hybrid.theirs.gradient_checkpointing_disable()
        hybrid.theirs.eval()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_autocast_is_close_to_fp32(convert: Callable[..., Converted], tokens: Tensor) -> None:
    layers = "attention,mamba,mamba2,gla,rwkv6,rwkv7,deltanet,based"
    model = convert(layers, {"attention": {"position_encoding": "alibi"}})
    expected, _ = _gradients(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        found, gradients = _gradients(model, tokens)
    assert float(found) == pytest.approx(float(expected), rel=0.03)
    assert float(found) != float(expected)
    assert all(gradient.isfinite().all() for gradient in gradients.values())


@torch.no_grad()
def test_rows_of_a_cache_are_selected(hybrid: Converted, tokens: Tensor) -> None:
    """Select rows of a cache, one of which has padding."""
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    prompt, rest = {"attention_mask": mask[:, :10], "use_cache": True}, tokens[:, 10:20]
    expected = hybrid.theirs(tokens[:, :20], attention_mask=mask[:, :20]).logits[:, 10:]

    def check_rows(rows: list[int], change: Callable[[Any], None]) -> None:
        cache = hybrid.theirs(tokens[:, :10], **prompt).past_key_values
        change(cache)
        found = hybrid.theirs(rest[rows], attention_mask=mask[rows, :20], past_key_values=cache).logits
        torch.testing.assert_close(found, expected[rows], rtol=1e-5, atol=1e-5 * float(expected.abs().max()))

    check_rows([1, 0], lambda cache: cache.reorder_cache(torch.tensor([1, 0])))
    check_rows([1, 1, 0], lambda cache: cache.batch_select_indices(torch.tensor([1, 1, 0])))
    check_rows([0, 0, 0, 1, 1, 1], lambda cache: cache.batch_repeat_interleave(3))
    cache = hybrid.theirs(tokens[:, :10], **prompt).past_key_values
    cache.reset()
    assert cache.get_seq_length() == 0
    found = hybrid.theirs(tokens[:, :20], attention_mask=mask[:, :20], past_key_values=cache).logits
    torch.testing.assert_close(found[:, 10:], expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def test_a_new_model_has_finite_weights(hybrid: Converted, tokens: Tensor) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(hybrid.folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    with torch.no_grad():
        assert model(tokens).logits.isfinite().all()
    spread = {name: float(x.detach().std()) for name, x in model.named_parameters() if x.numel() > 500}
    assert all(0.015 < std < 0.025 for std in spread.values()), spread
    assert {float(x.detach().mean()) for name, x in model.named_parameters() if name.endswith("norm.weight")} == {1.0}


MASKS = {
    "between": ([1, 0, 1, 1], "padding between the tokens"),
    "none": ([0, 0, 0, 0], "without any token"),
    "right": ([1, 1, 1, 0], "padding after the tokens"),
    "short": ([1, 1, 1], r"attention_mask has shape \[1, 3\]: give \[1, 4\]"),
}


@pytest.mark.parametrize("case", list(MASKS))
def test_unsupported_masks_are_refused(pattern: Converted, tokens: Tensor, case: str) -> None:
    mask, message = MASKS[case]
    with pytest.raises(ValueError, match=message):
        pattern.theirs(tokens[:1, :4], attention_mask=torch.tensor([mask]), use_cache=True)


def test_right_padding_has_no_effect_without_a_cache(pattern: Converted, tokens: Tensor) -> None:
    mask = torch.ones_like(tokens)
    mask[0, 50:] = 0
    with torch.no_grad():
        output = pattern.theirs(tokens, attention_mask=mask)
        found = output.logits
        assert output.past_key_values is None
        torch.testing.assert_close(found[0, :50], pattern.theirs(tokens[:1, :50]).logits[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found[1], pattern.theirs(tokens[1:]).logits[0], rtol=1e-5, atol=1e-5)


def test_unsupported_arguments_are_refused(pattern: Converted, hybrid: Converted, tokens: Tensor) -> None:
    from transformers import DynamicCache

    with pytest.raises(ValueError, match="position_ids is not an argument"):
        pattern.theirs(tokens, position_ids=torch.zeros_like(tokens))
    with pytest.raises(ValueError, match="either input_ids or inputs_embeds"):
        pattern.theirs()
    with pytest.raises(ValueError, match="past_key_values is a DynamicCache"):
        pattern.theirs(tokens, past_key_values=DynamicCache())
    cache = pattern.theirs(tokens[:, :4], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values does not match"):
        pattern.theirs(tokens[:1, 4:5], past_key_values=cache)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="past_key_values does not match"):
        pattern.theirs(tokens[:, 4:5], past_key_values=cache, attention_mask=mask)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(1)
    with pytest.raises(ValueError, match="73 tokens, but the learned position table has 72 rows"):
        hybrid.theirs(torch.cat([tokens, tokens[:, :1]], 1))
    with pytest.raises(ValueError, match="assisted generation is not supported"):
        pattern.theirs.generate(tokens[:1, :4], assistant_model=hybrid.theirs, max_new_tokens=2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block", "other", "block is 'other'"),
        ("normalization", "other", "normalization is 'other'"),
        ("mixers", {}, r"mixers has no settings of \['attention'"),
    ],
)
def test_invalid_configurations_are_refused(pattern: Converted, field: str, value: Any, message: str) -> None:
    config_class = type(pattern.theirs.config)
    with pytest.raises(ValueError, match=message):
        config_class(**pattern.theirs.config.to_dict() | {field: value})
    fields = pattern.theirs.config.to_dict() | {"layer_mixers": ["other"], "mixers": {"other": {}}}
    with pytest.raises(ValueError, match="layer_mixers contains 'other'"):
        type(pattern.theirs)(config_class(**fields))
