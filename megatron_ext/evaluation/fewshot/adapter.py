"""Adapter from `TextModel` to lm-eval's model interface.

The model receives the same tokens as a model of lm-eval's own Hugging Face adapter. This module imports lm-eval.
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

from megatron_ext.evaluation.text_model import Draw, Request, TextModel
from megatron_ext.utils.errors import UserError

MAX_TOKENS = 256
"""Default maximum number of generated tokens, the same as in lm-eval's Hugging Face adapter."""

PIECE = 256
"""Number of texts passed to the model per call: enough to occupy all ranks, few enough for a useful progress bar."""

USUAL = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
"""Default sampling parameters, equal to those of transformers' `generate`, which lm-eval's Hugging Face model calls."""

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")
Pair = tuple[Any, list[int], list[int]]
"""lm-eval's request: (context and continuation as texts or None, tokens of the context, tokens of the continuation)."""


@dataclass(frozen=True)
class Generation:
    """Generation settings of a task.

    Attributes:
        until: stop texts. Generation ends at the first stop text, which is not part of the result.
        max_tokens: maximum number of tokens to generate.
        draw: sampling parameters with an empty identity; None: greedy decoding or beam search.
        num_beams: number of beams of a beam search; 1: no beam search.
    """

    until: tuple[str, ...]
    max_tokens: int
    draw: Draw | None = None
    num_beams: int = 1


def generation_of(arguments: Mapping[str, Any], max_length: int) -> Generation:
    """Parse the generation arguments of a task.

    Args:
        arguments: `generation_kwargs` of the task.
        max_length: maximum number of tokens of a forward pass.

    Raises:
        UserError: an argument is not supported (such as a penalty for repeated tokens) or out of range, or the maximum
            number of generated tokens leaves no room for a prompt.
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
        hint = "remove the task, or run it with lm-eval on an exported checkpoint"
        raise UserError("fewshot.tasks", f"the task requests an unsupported option: {asked}", hint)
    if max_tokens >= max_length:
        problem = (
            f"the task generates up to {max_tokens} tokens, but the model supports {max_length} including the question"
        )
        raise UserError("fewshot.tasks", problem, "remove the task for this model")
    if num_beams < 1:
        raise _unfit("searches", "num_beams", num_beams)
    return Generation(tuple(until), max_tokens, _draw_of(shape) if draws else None, num_beams)


def _unfit(does: str, name: str, value: Any) -> UserError:
    hint = "fix the task's generation_kwargs, or remove the task"
    return UserError("fewshot.tasks", f"the task {does} with {name}={value}", hint)


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
    """lm-eval model over a `TextModel`.

    Its methods are collective: every rank runs lm-eval on all rows and makes the same requests. Each rank therefore
    keeps the base class's `rank` of 0 and `world_size` of 1.

    Args:
        model: model that computes the results.
        seed: seed of sampling.

    Attributes:
        asked: number of texts passed to the model so far; each choice of a question is one text.
        truncated: number of these texts that were too long and lost their beginning.
    """

    def __init__(self, model: TextModel, seed: int = 0) -> None:
        super().__init__()
        self._model, self._seed = model, seed
        self.asked = self.truncated = 0

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-document token, which lm-eval uses as the context of a text without context."""
        return self._model.end_id

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a forward pass."""
        return self._model.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text without adding special tokens; the arguments other than `string` are ignored."""
        return self._model.encode(string)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text in nats. Texts above `max_length` are cut into windows."""
        windows = [self._windows(text) for (text,) in (request.args for request in requests)]
        answers = iter(self._loglikelihood_tokens([pair for pairs in windows for pair in pairs], disable_tqdm))
        return [sum(next(answers)[0] for _ in pairs) for pairs in windows]

    def _windows(self, text: str) -> list[Pair]:
        """Return windows of at most `max_length` tokens that together predict each token of the text once."""
        tokens = self._model.encode(text)
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        return [(None, *make_disjoint_window(window)) for window in windows]

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability in nats, whether all tokens are the most likely tokens) of each continuation."""
        asked = [self._request(*request) for request in requests]
        scores = _in_pieces(asked, _size, self._model.scores, "Scoring", disable_tqdm)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _request(self, texts: Any, context: list[int], continuation: list[int]) -> Request:
        """Build a request. The beginning of a context that is too long is dropped.

        Raises:
            UserError: the context or the continuation is empty, or the continuation alone is too long.
        """
        if not context or not 0 < len(continuation) <= self.max_length:
            problem = f"{len(continuation)} tokens are asked for after {len(context)}, of {str(texts)[:80]!r}"
            hint = f"this model takes at least one after one, and at most {self.max_length}: leave the task out for it"
            raise UserError("fewshot.tasks", problem, hint)
        room = self.max_length + 1 - len(continuation)
        return Request(self._end_of(context, room), continuation)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each text, cut before the first stop text of its task."""
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
        """Return the tokens of a prompt and its sampling parameters.

        Every prompt has random numbers of its own, even if the same text occurs twice.
        """
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
        # The end-of-document token also stops generation where the model writes it out as characters.
        stops = [stop for stop in handle_stop_sequences(list(generation.until), decode([self.eot_token_id])) if stop]
        # lm-eval searches a stop text in this number of last tokens. With another number, a beam search would end at
        # other tokens.
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
    """Process items in pieces of `PIECE`, longest first, and return the results in the order of the items.

    The order by size gives items of similar length to each piece.
    """
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
