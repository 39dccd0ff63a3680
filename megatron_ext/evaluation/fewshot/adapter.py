"""A `TextModel` as a model of lm-eval: what lm-eval asks, token for token as its own Hugging Face model would ask.

Imports lm-eval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron_ext.errors import UserError
from megatron_ext.evaluation.text_model import Draw, Request, TextModel

MAX_TOKENS = 256
"""Tokens that are generated at most where a task does not say: as many as by lm-eval's Hugging Face model."""

PIECE = 256
"""Texts that the model is given at a time: enough to fill every layout, few enough to see how far it is."""

USUAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
"""Of a draw, where a task does not say: as transformers' `generate`, which lm-eval's Hugging Face model calls."""

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
        draw: how tokens are drawn, for any text; None: the likeliest are taken.
        num_beams: of a beam search; 1: there is none.
    """

    until: tuple[str, ...]
    max_tokens: int
    draw: Draw | None = None
    num_beams: int = 1


def generation_of(arguments: Mapping[str, Any], max_length: int) -> Generation:
    """What a task's generation arguments ask for.

    Args:
        arguments: a task's `generation_kwargs`.
        max_length: tokens that the model takes at most.

    Raises:
        UserError: they ask for what is not done here, as a penalty for repeated tokens, or for as many tokens as leave
            no room for a question.
    """
    given = dict(normalize_gen_kwargs(dict(arguments), MAX_TOKENS))
    until, max_tokens, draws = given.pop("until"), given.pop("max_gen_toks"), given.pop("do_sample")
    num_beams = given.pop("num_beams", 1)
    shape = {name: default if given.get(name) is None else given[name] for name, default in USUAL.items()}
    others = {name: value for name, value in given.items() if name not in USUAL}
    if draws and num_beams > 1:
        others |= {"do_sample": draws, "num_beams": num_beams}
    if others:
        asked = ", ".join(f"{name}={value}" for name, value in others.items())
        mend = "leave the task out, or run it with lm-eval on an exported checkpoint"
        raise UserError("fewshot.tasks", f"the task asks for what is not done here: {asked}", mend)
    if max_tokens >= max_length:
        problem = f"the task generates up to {max_tokens} tokens, and the model takes {max_length} with the question"
        raise UserError("fewshot.tasks", problem, "leave the task out for this model")
    if num_beams < 1:
        raise _unfit("searches", "num_beams", num_beams)
    return Generation(tuple(until), max_tokens, _draw_of(shape) if draws else None, num_beams)


def _unfit(does: str, name: str, value: Any) -> UserError:
    mend = "mend the task's generation_kwargs, or leave the task out"
    return UserError("fewshot.tasks", f"the task {does} with {name}={value}", mend)


def _draw_of(shape: Mapping[str, Any]) -> Draw:
    temperature, top_k, top_p, min_p = (shape[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    for name, fits in (
        ("temperature", temperature > 0),
        ("top_k", top_k >= 0),
        ("top_p", 0 < top_p <= 1),
        ("min_p", 0 <= min_p <= 1),
    ):
        if not fits:
            raise _unfit("draws", name, shape[name])
    return Draw((), float(temperature), int(top_k) or None, float(top_p), float(min_p))


class SelectronLM(TemplateLM):
    """A model of lm-eval over a `TextModel`.

    Its calls are collective: every rank runs lm-eval on all rows and asks the same, so that to lm-eval each is the one
    rank there is (`rank` 0 of `world_size` 1, as its base class says).

    Args:
        model: what answers.
        seed: of what is drawn.

    Attributes:
        asked: texts so far that the model was given; each choice of a question is one.
        truncated: those of them that were longer than it takes, and lost their beginning.
    """

    def __init__(self, model: TextModel, seed: int = 0) -> None:
        super().__init__()
        self._model, self._seed = model, seed
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
        """Continuations of texts, cut before the first of a task's stop texts."""
        alike: dict[Generation, list[int]] = {}
        for number, request in enumerate(requests):
            _, arguments = request.args
            alike.setdefault(generation_of(arguments, self.max_length), []).append(number)
        found: dict[int, str] = {}
        for generation, numbers in alike.items():
            questions = [self._question(requests[number].args[0], generation) for number in numbers]
            found |= zip(numbers, self._generate(questions, generation, disable_tqdm), strict=True)
        return [found[number] for number in range(len(requests))]

    def _question(self, text: str, generation: Generation) -> tuple[list[int], Draw | None]:
        """Tokens of a prompt, and how those after it are drawn: each text by itself, the same text asked twice, too."""
        prompt = self._prompt(text, generation.max_tokens)
        draw = None if generation.draw is None else replace(generation.draw, identity=(self._seed, self.asked))
        return prompt, draw

    def _prompt(self, text: str, max_tokens: int) -> list[int]:
        tokens = self._model.encode(text) or [self.prefix_token_id]
        return self._end_of(tokens, self.max_length - max_tokens)

    def _end_of(self, tokens: list[int], room: int) -> list[int]:
        self.asked += 1
        self.truncated += len(tokens) > room
        return tokens[-room:]

    def _generate(
        self, questions: Sequence[tuple[list[int], Draw | None]], generation: Generation, disable_tqdm: bool
    ) -> list[str]:
        decode = self._model.decode
        # The end of a document ends a text as a token, and as characters that the model writes out.
        stops = [stop for stop in handle_stop_sequences(list(generation.until), decode([self.eot_token_id])) if stop]
        # As many last tokens as lm-eval looks at: where a search with beams ends is decided by them.
        windows: defaultdict[int, list[str]] = defaultdict(list)
        for stop in stops:
            windows[len(self._model.encode(stop)) + 2].append(stop)

        def is_done(tokens: Sequence[int]) -> bool:
            ends = ((decode(tokens[-window:]), some) for window, some in windows.items())
            return any(stop in text for text, some in ends for stop in some)

        def generate(piece: Sequence[tuple[list[int], Draw | None]]) -> list[list[int]]:
            draws = [draw for _, draw in piece if draw is not None]
            prompts = [prompt for prompt, _ in piece]
            return self._model.generate(prompts, generation.max_tokens, is_done, draws or None, generation.num_beams)

        def size(question: tuple[list[int], Draw | None]) -> int:
            return len(question[0])

        continuations = _in_pieces(questions, size, generate, "Generating", disable_tqdm)
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
