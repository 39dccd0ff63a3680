"""Sub-command `generate`: continue a text with a trained run's model."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.utils.atomic_files import os_error_reason
from megatron_ext.utils.errors import UserError
from megatron_ext.utils.printable import text_output

if TYPE_CHECKING:
    from megatron_ext.runs.open_run import TrainedRun

MAX_SEED = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="file with the text to continue, UTF-8")
    add(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of tokens to generate (default %(default)s)",
    )
    add("--temperature", type=float, default=1.0, metavar="T", help="divisor of the logits (default %(default)s)")
    nucleus = "sample from the most probable tokens whose probabilities sum to P (default %(default)s: from all)"
    add("--top-p", type=float, default=1.0, metavar="P", help=nucleus)
    add("--greedy", action="store_true", help="take the most probable token instead of sampling")
    add("--seed", type=int, default=1, metavar="N", help="seed of the sampling (default %(default)s)")
    add("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")


def run(args: argparse.Namespace) -> int:
    """Write the continuation of a prompt to standard output as it is generated.

    Args:
        args: see `add_arguments`.

    Returns:
        The exit code.

    Raises:
        UserError: an option is out of range, or the run, its tokenizer or its checkpoint does not exist.
    """
    _check_options(args)
    _print_continuation(_prompt(args), args)
    return 0


def _check_options(args: argparse.Namespace) -> None:
    if not (args.temperature > 0 and math.isfinite(args.temperature)):
        hint = "give a finite number above 0, or use --greedy"
        raise UserError("--temperature", f"{args.temperature} is not above 0 and finite", hint)
    if not 0 < args.top_p <= 1:
        raise UserError("--top-p", f"{args.top_p} is not in (0, 1]", "give 1 to sample from all tokens, or less")
    if args.greedy and (args.temperature, args.top_p) != (1.0, 1.0):
        raise UserError(
            "--greedy",
            "does not sample, so --temperature and --top-p have no effect",
            "omit either --greedy or these options",
        )
    if not 0 <= args.seed <= MAX_SEED:
        raise UserError("--seed", f"{args.seed} is not in 0 .. {MAX_SEED}", "give a number in that range")
    if args.max_tokens < 1:
        raise UserError("--max-tokens", f"{args.max_tokens} is less than 1", "give 1 or more")


def _prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is None:
        where, text = "--prompt", args.prompt
    else:
        where, text = "--prompt-file", _read_prompt_file(args.prompt_file)
    if not text:
        raise UserError(where, "is empty", "give the beginning of a text")
    return text


def _read_prompt_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            "--prompt-file", f"{path} cannot be read ({os_error_reason(error)})", "give a text file"
        ) from None
    except UnicodeDecodeError:
        raise UserError("--prompt-file", f"{path} is not UTF-8", "give a UTF-8 text file") from None


def _print_continuation(prompt: str, args: argparse.Namespace) -> None:
    # Imported here so that help and errors do not wait for torch.
    import torch

    from megatron_ext.platform.device import prepare_megatron_import

    prepare_megatron_import()
    from megatron_ext.evaluation.decoding import decoding
    from megatron_ext.evaluation.generation import Sampler, decode_stream, generate, greedy
    from megatron_ext.evaluation.text_model import SamplingParameters
    from megatron_ext.runs.open_run import loaded_model, open_run

    trained = open_run(args.run, args.step)
    tokenizer = trained.tokenizer
    ids = tokenizer.encode(prompt)
    sampling = SamplingParameters((args.seed,), args.temperature, top_p=args.top_p)
    _check_length(trained, len(ids), args.max_tokens)
    with loaded_model(trained) as model, decoding(model) as decoder:
        tokens = generate(
            decoder,
            torch.tensor(ids, device=trained.platform.device),
            vocab_size=tokenizer.size,
            max_tokens=args.max_tokens,
            end=tokenizer.end_id_or_none,
            choose=greedy if args.greedy else Sampler(sampling, torch.Generator().manual_seed(args.seed)),
        )
        for text in decode_stream(tokens, tokenizer.decode, before=ids):
            print(text, end="", flush=True, file=text_output())
    print()


def _check_length(trained: TrainedRun, prompt_tokens: int, max_tokens: int) -> None:
    limit = trained.shape.model.max_position_embeddings
    assert limit is not None, "derived by the configuration"
    if trained.shape.learns_positions and prompt_tokens + max_tokens > limit:
        raise UserError(
            "--max-tokens",
            f"{max_tokens} after a prompt of {prompt_tokens} tokens exceeds model.max_position_embeddings {limit}",
            "request fewer tokens, or shorten the prompt",
        )
    trained_length = trained.config.data.seq_length
    if prompt_tokens + max_tokens > trained_length:
        lengths = f"a prompt of {prompt_tokens} tokens and {max_tokens} more"
        problem = f"exceed the training sequence length {trained_length}; text beyond it may be poor"
        print(f"selectron: warning: {lengths} {problem}", file=sys.stderr, flush=True)
