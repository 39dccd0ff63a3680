"""A small transformers model with random weights, as lm-eval's own model and as a plain `TextModel`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from megatron_ext.evaluation.beams import Beams
from megatron_ext.evaluation.generation import Choose, Sampler, greedy
from megatron_ext.evaluation.text_model import Request, SamplingParameters, Score

END = "<|endoftext|>"
MAX_LENGTH = 128


def small_tokenizer(text: Sequence[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def small_llama(vocab_size: int) -> LlamaForCausalLM:
    """Build a Llama of two layers. The large spread of weights makes the tokens' probabilities differ."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def lm_evals_own(model: LlamaForCausalLM, tokenizer: Tokenizer) -> Any:
    """Return lm-eval's Hugging Face model with a batch size of 1."""
    from lm_eval.models.huggingface import HFLM

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    return HFLM(pretrained=model, tokenizer=fast, batch_size=1)


class PlainModel:
    """Simplest possible `TextModel`: one text at a time, without a decode cache. It records its requests."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self.asked: list[Any] = []

    @property
    def end_id(self) -> int:
        return 0

    @property
    def max_length(self) -> int:
        return MAX_LENGTH

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=False)

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        self.asked.append(list(requests))
        return [self._score(request) for request in requests]

    def _score(self, request: Request) -> Score:
        tokens = [*request.context, *request.continuation][:-1]
        assert len(tokens) <= MAX_LENGTH
        log_p_tv = self._logits(tokens)[-len(request.continuation) :].log_softmax(-1)
        targets = torch.tensor(request.continuation)
        likeliest = log_p_tv.argmax(-1)
        return Score(float(log_p_tv[range(len(targets)), targets].sum()), bool((likeliest == targets).all()))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        is_done: Callable[[Sequence[int]], bool],
        sampling: Sequence[SamplingParameters] | None = None,
        num_beams: int = 1,
    ) -> list[list[int]]:
        self.asked.append((list(prompts), max_tokens, sampling))
        if num_beams > 1:
            return [self._search(prompt, Beams(num_beams, max_tokens, self.end_id, is_done)) for prompt in prompts]
        choices = [greedy] * len(prompts) if sampling is None else [Sampler(draw) for draw in sampling]
        return [
            self._continue(list(prompt), max_tokens, is_done, choose)
            for prompt, choose in zip(prompts, choices, strict=True)
        ]

    def _continue(
        self, prompt: list[int], max_tokens: int, is_done: Callable[[Sequence[int]], bool], choose: Choose
    ) -> list[int]:
        assert len(prompt) + max_tokens <= MAX_LENGTH
        found: list[int] = []
        while len(found) < max_tokens and not (found and is_done(found)):
            token = choose(self._logits([*prompt, *found])[-1])
            if token == self.end_id:
                break
            found.append(token)
        return found

    def _search(self, prompt: Sequence[int], beams: Beams) -> list[int]:
        texts = [list(prompt)] * beams.num_beams
        while beams.is_open:
            logits_nv = torch.stack([self._logits(text)[-1] for text in texts])
            numbers, tokens = beams.advance(logits_nv)
            texts = [[*texts[number], token] for number, token in zip(numbers, tokens, strict=True)]
        return beams.best

    @torch.no_grad()
    def _logits(self, tokens: list[int]) -> torch.Tensor:
        return self._model(torch.tensor([tokens])).logits[0]
