"""What `selectron generate` does: a trained run's model continues a text."""

from __future__ import annotations

import argparse
import math
from functools import partial

import torch

from data_prep.tokenizer import load_tokenizer
from megatron_ext.errors import UserError
from megatron_ext.evaluation.decoding import decoding
from megatron_ext.evaluation.generation import Choose, Sampler, generate, greedy, text_of
from megatron_ext.training.trained import TrainedRun, open_run, trained_model

LARGEST_SEED = 2**63 - 1


def run(args: argparse.Namespace) -> int:
    """Write the text that follows a prompt to standard output, as it comes.

    Args:
        args: the command's arguments, see `cli`.

    Returns:
        The exit code.

    Raises:
        UserError: an option is out of its range; the run, its tokenizer or its checkpoint is not there.
    """
    choose = _choose(args)
    prompt = _prompt(args)
    trained = open_run(args.run)
    tokenizer = load_tokenizer(trained.tokenizer_file)
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # as in training: text cannot end a document
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    _check_length(trained, len(ids), args.max_tokens)
    with trained_model(trained, args.step) as model, decoding(model) as decoder:
        tokens = generate(
            decoder,
            torch.tensor(ids, device=trained.platform.device),
            vocab_size=trained.tokenizer.vocab_size,
            max_tokens=args.max_tokens,
            end=trained.tokenizer.eos_id,
            choose=choose,
        )
        for text in text_of(tokens, partial(tokenizer.decode, skip_special_tokens=False), before=ids):
            print(text, end="", flush=True)
    print()
    return 0


def _choose(args: argparse.Namespace) -> Choose:
    if not (args.temperature > 0 and math.isfinite(args.temperature)):
        raise UserError(
            "--temperature", f"{args.temperature} is not above 0", "give a number above 0, or --greedy to draw nothing"
        )
    if not 0 < args.top_p <= 1:
        raise UserError("--top-p", f"{args.top_p} is not in (0, 1]", "give 1 to draw from all tokens, or less")
    if not 0 <= args.seed <= LARGEST_SEED:
        raise UserError("--seed", f"{args.seed} is not in 0 .. {LARGEST_SEED}", "give a number in that range")
    if not args.greedy:
        return Sampler(args.temperature, args.top_p, args.seed)
    if (args.temperature, args.top_p) != (1.0, 1.0):
        raise UserError("--greedy", "draws nothing, and --temperature or --top-p is given", "leave one of them out")
    return greedy


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is None:
        where, text = "--prompt", args.prompt
    else:
        where = "--prompt-file"
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(where, f"{args.prompt_file} cannot be read ({error.strerror})", "give a file") from None
        except UnicodeDecodeError:
            raise UserError(where, f"{args.prompt_file} is not UTF-8", "give a UTF-8 text file") from None
    if not text:
        raise UserError(where, "is empty", "give the beginning of a text")
    return text


def _check_length(trained: TrainedRun, prompt_tokens: int, max_tokens: int) -> None:
    if max_tokens < 1:
        raise UserError("--max-tokens", f"{max_tokens} is less than 1", "give 1 or more")
    table = trained.shape.model.max_position_embeddings
    assert table is not None, "derived"
    if trained.shape.learns_positions and prompt_tokens + max_tokens > table:
        raise UserError(
            "--max-tokens",
            f"{max_tokens} after a prompt of {prompt_tokens} tokens is more than model.max_position_embeddings {table}",
            "ask for fewer, or shorten the prompt",
        )
