"""Adapter from `TextModel` to lm-eval's model interface.

The model receives the same tokens as a model of lm-eval's own Hugging Face adapter. This module imports lm-eval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from megatron_ext.evaluation.text_model import Request, SamplingParameters, TextModel
from megatron_ext.utils.errors import UserError

MAX_TOKENS = 256
"""Default maximum number of generated tokens, the same as in lm-eval's Hugging Face adapter."""

BATCH_SIZE = 256
"""Number of texts passed to the model per call: enough to occupy all ranks, few enough for a useful progress bar."""

SAMPLING_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0}
"""Default sampling parameters, equal to those of transformers' `generate`, which lm-eval's Hugging Face model calls."""

Item = TypeVar("Item")
Result = TypeVar("Result")
Pair = tuple[Any, list[int], list[int]]
"""lm-eval's request: (context and continuation as texts or None, tokens of the context, tokens of the continuation)."""


@dataclass(frozen=True)
class GenerationSettings:
    """Generation settings of a task.

    Attributes:
        until: stop texts. Generation ends at the first stop text, which is not part of the result.
        max_tokens: maximum number of tokens to generate.
        sampling: sampling parameters with an empty identity; None: greedy decoding or beam search.
        num_beams: number of beams of a beam search; 1: no beam search.
    """

    until: tuple[str, ...]
    max_tokens: int
    sampling: SamplingParameters | None = None
    num_beams: int = 1


def parse_generation_settings(arguments: Mapping[str, Any], max_length: int) -> GenerationSettings:
    """Parse the generation arguments of a task.

    Args:
        arguments: `generation_kwargs` of the task.
        max_length: maximum number of tokens of a forward pass.

    Raises:
        UserError: an argument is not supported (such as a penalty for repeated tokens) or out of range, or the maximum
            number of generated tokens leaves no room for a prompt.
    """
    options = dict(normalize_gen_kwargs(dict(arguments), MAX_TOKENS))
    until, max_tokens, do_sample = options.pop("until"), options.pop("max_gen_toks"), options.pop("do_sample")
    num_beams = options.pop("num_beams", 1)
    sampling = {
        name: default if options.get(name) is None else options[name] for name, default in SAMPLING_DEFAULTS.items()
    }
    unsupported = {name: value for name, value in options.items() if name not in SAMPLING_DEFAULTS}
    if do_sample and num_beams > 1:
        unsupported |= {"do_sample": do_sample, "num_beams": num_beams}
    if unsupported:
        listed = ", ".join(f"{name}={value}" for name, value in unsupported.items())
        hint = "remove the task, or run it with lm-eval on an exported checkpoint"
        raise UserError("fewshot.tasks", f"the task requests an unsupported option: {listed}", hint)
    if max_tokens >= max_length:
        problem = (
            f"the task generates up to {max_tokens} tokens, but the model supports {max_length} including the question"
        )
        raise UserError("fewshot.tasks", problem, "remove the task for this model")
    if num_beams < 1:
        raise _invalid_argument("num_beams", num_beams)
    return GenerationSettings(tuple(until), max_tokens, _parse_sampling(sampling) if do_sample else None, num_beams)


def _invalid_argument(name: str, value: Any) -> UserError:
    hint = "fix the task's generation_kwargs, or remove the task"
    return UserError("fewshot.tasks", f"the task sets {name}={value}, which is out of range", hint)


def _parse_sampling(sampling: Mapping[str, Any]) -> SamplingParameters:
    temperature, top_k, top_p, min_p = (sampling[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    for name, is_valid in (
        ("temperature", temperature > 0),
        ("top_k", top_k >= 0),
        ("top_p", 0 < top_p <= 1),
        ("min_p", 0 <= min_p <= 1),
    ):
        if not is_valid:
            raise _invalid_argument(name, sampling[name])
    return SamplingParameters((), float(temperature), int(top_k) or None, float(top_p), float(min_p))


class SelectronLM(TemplateLM):
    """lm-eval model over a `TextModel`.

    Its methods are collective: every rank runs lm-eval on all rows and makes the same requests. Each rank therefore
    keeps the base class's `rank` of 0 and `world_size` of 1.

    Args:
        model: model that computes the results.
        seed: seed of sampling.

    Attributes:
        num_texts: number of texts passed to the model so far; each choice of a question is one text.
        truncated: number of these texts that were too long and lost their beginning.
    """

    def __init__(self, model: TextModel, seed: int = 0) -> None:
        super().__init__()
        self._model, self._seed = model, seed
        self.num_texts = self.truncated = 0

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
        parsed = [self._request(*request) for request in requests]
        scores = _in_batches(parsed, _request_size, self._model.scores, "Scoring", disable_tqdm)
        return [(score.log_probability, score.is_greedy) for score in scores]

    def _request(self, texts: Any, context: list[int], continuation: list[int]) -> Request:
        """Build a request. The beginning of a context that is too long is dropped.

        Raises:
            UserError: the context or the continuation is empty, or the continuation alone is too long.
        """
        if not context or not 0 < len(continuation) <= self.max_length:
            lengths = f"a context of {len(context)} and a continuation of {len(continuation)} tokens"
            hint = f"the model needs a context and a continuation of 1 to {self.max_length} tokens: remove the task"
            raise UserError("fewshot.tasks", f"{lengths}: {str(texts)[:80]!r}", hint)
        max_context = self.max_length + 1 - len(continuation)
        return Request(self._keep_last(context, max_context), continuation)

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each text, cut before the first stop text of its task."""
        by_settings: dict[GenerationSettings, list[int]] = {}
        for index, request in enumerate(requests):
            _, arguments = request.args
            by_settings.setdefault(parse_generation_settings(arguments, self.max_length), []).append(index)
        continuations: dict[int, str] = {}
        for settings, indices in by_settings.items():
            prompts = [self._prompt_and_sampling(requests[index].args[0], settings) for index in indices]
            continuations |= zip(indices, self._generate(prompts, settings, disable_tqdm), strict=True)
        return [continuations[index] for index in range(len(requests))]

    def _prompt_and_sampling(
        self, text: str, settings: GenerationSettings
    ) -> tuple[list[int], SamplingParameters | None]:
        """Return the tokens of a prompt and its sampling parameters.

        Every prompt has random numbers of its own, even if the same text occurs twice.
        """
        prompt = self._prompt(text, settings.max_tokens)
        if settings.sampling is None:
            return prompt, None
        return prompt, replace(settings.sampling, identity=(self._seed, self.num_texts))

    def _prompt(self, text: str, max_tokens: int) -> list[int]:
        tokens = self._model.encode(text) or [self.prefix_token_id]
        return self._keep_last(tokens, self.max_length - max_tokens)

    def _keep_last(self, tokens: list[int], max_tokens: int) -> list[int]:
        """Return the last tokens of a text, and count the text."""
        self.num_texts += 1
        self.truncated += len(tokens) > max_tokens
        return tokens[-max_tokens:]

    def _generate(
        self,
        prompts: Sequence[tuple[list[int], SamplingParameters | None]],
        settings: GenerationSettings,
        disable_tqdm: bool,
    ) -> list[str]:
        decode = self._model.decode
        # The end-of-document token also stops generation where the model writes it out as characters.
        stops = [stop for stop in handle_stop_sequences(list(settings.until), decode([self.eot_token_id])) if stop]
        # lm-eval searches a stop text in as many last tokens. With another window, a beam search could end elsewhere.
        windows: defaultdict[int, list[str]] = defaultdict(list)
        for stop in stops:
            windows[len(self._model.encode(stop)) + 2].append(stop)

        def is_done(tokens: Sequence[int]) -> bool:
            endings = ((decode(tokens[-window:]), window_stops) for window, window_stops in windows.items())
            return any(stop in ending for ending, window_stops in endings for stop in window_stops)

        def generate(batch: Sequence[tuple[list[int], SamplingParameters | None]]) -> list[list[int]]:
            tokens = [prompt for prompt, _ in batch]
            sampling = [parameters for _, parameters in batch if parameters is not None]
            return self._model.generate(tokens, settings.max_tokens, is_done, sampling or None, settings.num_beams)

        def size(prompt: tuple[list[int], SamplingParameters | None]) -> int:
            return len(prompt[0])

        continuations = _in_batches(prompts, size, generate, "Generating", disable_tqdm)
        return [postprocess_generated_text(decode(tokens), stops, None) for tokens in continuations]


def _request_size(request: Request) -> int:
    return len(request.context) + len(request.continuation)


def _in_batches(
    items: Sequence[Item],
    size: Callable[[Item], int],
    process: Callable[[Sequence[Item]], Sequence[Result]],
    title: str,
    quiet: bool,
) -> list[Result]:
    """Process items in batches of `BATCH_SIZE`, longest first, and return the results in the order of the items.

    The order by size gives items of similar length to each batch.
    """
    order = sorted(range(len(items)), key=lambda index: -size(items[index]))
    results: dict[int, Result] = {}
    with tqdm(total=len(items), desc=title, disable=quiet) as progress:
        for first in range(0, len(order), BATCH_SIZE):
            indices = order[first : first + BATCH_SIZE]
            results |= zip(indices, process([items[index] for index in indices]), strict=True)
            progress.update(len(indices))
    return [results[index] for index in range(len(items))]
