"""A `TextModel` as a model of lm-eval: what lm-eval asks, token for token as its own Hugging Face model would ask.

Imports lm-eval.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron_ext.errors import UserError
from megatron_ext.evaluation.text_model import Request, TextModel

MAX_TOKENS = 256
"""Tokens that are generated at most where a task does not say: as many as by lm-eval's Hugging Face model."""

PIECE = 256
"""Texts that the model is given at a time: enough to fill every layout, few enough to see how far it is."""

OF_A_DRAW = {"temperature", "top_k", "top_p", "min_p"}
"""Arguments that shape a draw; where nothing is drawn they say nothing."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Pair = tuple[Any, list[int], list[int]]
"""Two texts (or none), and their tokens: what is given, and what is asked for."""


@dataclass(frozen=True)
class Generation:
    """How a task wants text to go on.

    Attributes:
        until: texts that end it, and are cut off.
        max_tokens: most tokens.
    """

    until: tuple[str, ...]
    max_tokens: int


def greedy_generation(arguments: Mapping[str, Any], max_length: int) -> Generation:
    """What a task's generation arguments ask for.

    Args:
        arguments: a task's `generation_kwargs`.
        max_length: tokens that the model takes at most.

    Raises:
        UserError: they ask for anything but the likeliest tokens, or for as many as leave no room for a question.
    """
    given = dict(normalize_gen_kwargs(dict(arguments), MAX_TOKENS))
    until, max_tokens, draws = given.pop("until"), given.pop("max_gen_toks"), given.pop("do_sample")
    others = {
        name: value for name, value in given.items() if name not in OF_A_DRAW and (name, value) != ("num_beams", 1)
    }
    if draws or others:
        asked = ", ".join(f"{name}={value}" for name, value in arguments.items() if name in others or draws)
        mend = "choose a task that generates greedily, or run this one with lm-eval on an exported checkpoint"
        raise UserError("fewshot.tasks", f"the task does not generate greedily: {asked}", mend)
    if max_tokens >= max_length:
        problem = f"the task generates up to {max_tokens} tokens, and the model takes {max_length} with the question"
        raise UserError("fewshot.tasks", problem, "leave the task out for this model")
    return Generation(tuple(until), max_tokens)


class SelectronLM(TemplateLM):
    """A model of lm-eval over a `TextModel`.

    Its calls are collective: every rank runs lm-eval on all rows and asks the same, so that to lm-eval each is the one
    rank there is (`rank` 0 of `world_size` 1, as its base class says).

    Args:
        model: what answers.

    Attributes:
        asked: texts so far that the model was given; each choice of a question is one.
        truncated: those of them that were longer than it takes, and lost their beginning.
    """

    def __init__(self, model: TextModel) -> None:
        super().__init__()
        self._model = model
        self.asked = self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        """Token that ends a document; it stands before a text without a context, too."""
        return self._model.end_id

    @property
    def max_length(self) -> int:
        """Tokens that a forward pass takes at most."""
        return self._model.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokens of a text, without special ones."""
        return self._model.encode(string)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, nats; a text longer than the model takes is read window by window."""
        windows = [self._windows(text) for (text,) in (request.args for request in requests)]
        answers = iter(self._loglikelihood_tokens([pair for pairs in windows for pair in pairs], disable_tqdm))
        return [sum(next(answers)[0] for _ in pairs) for pairs in windows]

    def _windows(self, text: str) -> list[Pair]:
        """Windows that predict each token once, with as much before it as the model takes."""
        tokens = self._model.encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        return [(None, *make_disjoint_window(window)) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of tokens after others, in nats, and whether each of them is the likeliest."""
        asked = [self._request(*request) for request in requests]
        scores = _in_pieces(asked, _size, self._model.scores, "Scoring", disable_tqdm)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _request(self, texts: Any, context: list[int], continuation: list[int]) -> Request:
        """What is asked for, with the end of a context that is too long.

        Raises:
            UserError: the tokens do not fit without their context either, or there are none.
        """
        if not context or not 0 < len(continuation) <= self.max_length:
            problem = f"{len(continuation)} tokens are asked for after {len(context)}, of {str(texts)[:80]!r}"
            mend = f"this model takes at least one after one, and at most {self.max_length}: leave the task out for it"
            raise UserError("fewshot.tasks", problem, mend)
        room = self.max_length + 1 - len(continuation)
        return Request(self._end_of(context, room), continuation)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The likeliest continuations of texts, cut before the first of a task's stop texts."""
        alike: dict[Generation, list[int]] = {}
        for number, request in enumerate(requests):
            _, arguments = request.args
            alike.setdefault(greedy_generation(arguments, self.max_length), []).append(number)
        found: dict[int, str] = {}
        for generation, numbers in alike.items():
            prompts = [self._prompt(requests[number].args[0], generation.max_tokens) for number in numbers]
            found |= zip(numbers, self._generate(prompts, generation, disable_tqdm), strict=True)
        return [found[number] for number in range(len(requests))]

    def _prompt(self, text: str, max_tokens: int) -> list[int]:
        tokens = self._model.encode(text) or [self.prefix_token_id]
        return self._end_of(tokens, self.max_length - max_tokens)

    def _end_of(self, tokens: list[int], room: int) -> list[int]:
        self.asked += 1
        self.truncated += len(tokens) > room
        return tokens[-room:]

    def _generate(self, prompts: Sequence[list[int]], generation: Generation, disable_tqdm: bool) -> list[str]:
        decode = self._model.decode
        # The end of a document ends a text as a token, and as characters that the model writes out.
        stops = [stop for stop in handle_stop_sequences(list(generation.until), decode([self.eot_token_id])) if stop]

        def is_done(tokens: Sequence[int]) -> bool:
            text = decode(tokens)
            return any(stop in text for stop in stops)

        def generate(piece: Sequence[list[int]]) -> list[list[int]]:
            return self._model.generate(piece, generation.max_tokens, is_done)

        continuations = _in_pieces(prompts, len, generate, "Generating", disable_tqdm)
        return [postprocess_generated_text(decode(tokens), stops, None) for tokens in continuations]


def _size(request: Request) -> int:
    return len(request.context) + len(request.continuation)


def _in_pieces(
    asked: Sequence[Asked],
    size: Callable[[Asked], int],
    answer: Callable[[Sequence[Asked]], Sequence[Answer]],
    title: str,
    quiet: bool,
) -> list[Answer]:
    """Answers in the order of what is asked; the longest first, so that those of a piece are of like lengths."""
    order = sorted(range(len(asked)), key=lambda number: -size(asked[number]))
    found: dict[int, Answer] = {}
    with tqdm(total=len(asked), desc=title, disable=quiet) as progress:
        for numbers in _cut(order):
            found |= zip(numbers, answer([asked[number] for number in numbers]), strict=True)
            progress.update(len(numbers))
    return [found[number] for number in range(len(asked))]


def _cut(order: Sequence[int]) -> Iterator[Sequence[int]]:
    for first in range(0, len(order), PIECE):
        yield order[first : first + PIECE]
