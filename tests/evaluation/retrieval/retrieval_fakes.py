"""Tokenizers of two granularities, and models that find everything or nothing.

Nothing here uses the code of the generators.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

from megatron_ext.evaluation.text_model import Request, SamplingParameters, Score, TeacherForcedQuery

END = 0


class Characters:
    """Tokenizer with one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


class Words:
    """Tokenizer with one token per word, including the blank before it, or per sign. Ids are assigned at first use."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"<end>": END}
        self._texts = ["<end>"]

    def encode(self, text: str) -> list[int]:
        return [self._number(word) for word in re.findall(r" ?\w+|\s|[^\w\s]", text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in tokens)

    def _number(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._texts)
            self._texts.append(word)
        return self._ids[word]


class FakeModel:
    """Fake model that answers a prompt with a given function and predicts tokens by induction."""

    end_id = END

    def __init__(self, tokenizer: Characters | Words, answer: Callable[[str], str], max_length: int = 131072) -> None:
        self.encode, self.decode = tokenizer.encode, tokenizer.decode
        self.max_length, self.asked = max_length, 0
        self._answer = answer

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        is_done: Callable[[Sequence[int]], bool],
        sampling: Sequence[SamplingParameters] | None = None,
        num_beams: int = 1,
    ) -> list[list[int]]:
        assert (sampling, num_beams) == (None, 1)
        assert all(len(prompt) + max_tokens <= self.max_length for prompt in prompts)
        self.asked += len(prompts)
        return [self._write(prompt, max_tokens, is_done) for prompt in prompts]

    def _write(self, prompt: Sequence[int], max_tokens: int, is_done: Callable[[Sequence[int]], bool]) -> list[int]:
        found: list[int] = []
        for token in self.encode(self._answer(self.decode(prompt)))[:max_tokens]:
            found.append(token)
            if is_done(found):
                break
        return found

    def scores(self, requests: Sequence[Request]) -> list[Score]:
        assert all(len(one.context) + len(one.continuation) - 1 <= self.max_length for one in requests)
        self.asked += len(requests)
        return [Score(-1.0, self.foretell(one.context) == list(one.continuation)) for one in requests]

    def misses(self, texts: Sequence[TeacherForcedQuery]) -> list[int]:
        assert all(one.positions[-1] <= self.max_length for one in texts)
        self.asked += len(texts)
        return [sum(self.foretell(one.tokens[:at]) != [one.tokens[at]] for at in one.positions) for one in texts]

    def foretell(self, context: Sequence[int]) -> list[int]:
        """Predict by induction, or, in a selective copying task, return the next token to copy.

        Selective copying is recognised by a majority of blank tokens.
        """
        blank, times = Counter(context).most_common(1)[0]
        if times > len(context) // 2:
            copied = [token for token in context if token != blank]
            mark = next(at for at in range(len(context) - 1, -1, -1) if context[at] == blank) + 1
            since = len(context) - 1 - mark
            return [copied[since]] if context[mark] not in context[:mark] else [_before_mark(context, blank)]
        earlier = [at for at in range(len(context) - 1) if context[at] == context[-1]]
        return [context[earlier[0] + 1]] if earlier else [END]


def _before_mark(context: Sequence[int], blank: int) -> int:
    """Return the next token to copy if no blank separates the last token to copy from the marker.

    The marker is then the first of the last 16 tokens that does not occur earlier.
    """
    first = next(at for at in range(len(context) - 16, len(context)) if context[at] not in context[:at])
    return [token for token in context[:first] if token != blank][len(context) - 1 - first]


def read(prompt: str) -> str:
    """Return the right answer to any text prompt."""
    if "pass key" in prompt:
        return " " + re.findall(r"The pass key is (\d+)\.", prompt)[0] + ". And so on."
    if "special magic" in prompt:
        asked = re.findall(r"mentioned in the provided text\? The special magic \w+ for (.*) mentioned", prompt)[0]
        needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.\s", prompt)
        return " " + ", ".join(value for key, value in needles if key in re.split(r", and |, ", asked))
    if "VAR" in prompt:
        return " ".join(resolve(prompt))
    if "numbered list" in prompt:
        return " " + " ".join(word for word, _ in Counter(listed(prompt)).most_common(10))
    return " " + " ".join(word for word, _ in Counter(coded(prompt)).most_common(3))


def resolve(prompt: str) -> list[str]:
    """Return the variables that hold the requested value, by interpreting the assignments in order."""
    wanted = re.findall(r"assigned the value (\d+) in the text above", prompt)[-1]
    held: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (\d+|VAR \w+)", prompt):
        held[name] = held[source.removeprefix("VAR ")] if source.startswith("VAR") else source
    return [name for name, value in held.items() if value == wanted]


def listed(prompt: str) -> list[str]:
    """Return the words of the last numbered list in the prompt."""
    return re.findall(r"\d+\. (\S+)", prompt.split("appear most often.\n")[-1].split("\nQuestion")[0])


def coded(prompt: str) -> list[str]:
    """Return the coded words without the dots."""
    return [word for word in prompt.split("coded words. ")[1].split("\nQuestion")[0].split() if word != "..."]


def guess(rng: random.Random) -> Callable[[str], str]:
    """Return a function whose answers do not depend on the prompt."""
    return lambda _: f" {rng.randint(10**6, 10**7 - 1)} {rng.getrandbits(128):x}."
