"""Options, name lists and report output shared by the benchmark commands."""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from kernels.bench.cases import OptionError

MAX_SEED = 2**32 - 1
"""Maximum seed. Further inputs use consecutive seeds, which must stay below torch's limit of 2**64 - 1."""


def add_run_arguments(parser: argparse.ArgumentParser, output: str) -> None:
    """Declare the options of a run and of its report.

    Args:
        parser: parser of the command.
        output: default folder of the report.
    """
    add = parser.add_argument
    add("--repeat", type=int, default=30, metavar="N", help="timed runs of each case (%(default)s)")
    add("--seed", type=int, metavar="N", help="seed of the inputs (a random one, recorded in the report)")
    add("--output", type=Path, default=Path(output), metavar="DIR", help="folder of the report (%(default)s)")
    add("--device", default="cuda", help="cuda or cuda:N (%(default)s)")


def resolve_seed(args: argparse.Namespace) -> int:
    """Return the requested seed, or a random one.

    Raises:
        OptionError: the seed is out of range.
    """
    seed: int = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    if not 0 <= seed <= MAX_SEED:
        raise OptionError("--seed", f"{seed} is not in 0 .. {MAX_SEED}", "give a number in that range")
    return seed


def require_positive(option: str, value: int) -> int:
    """Return the value of an option if it is at least 1.

    Raises:
        OptionError: the value is less than 1.
    """
    if value < 1:
        raise OptionError(option, f"{value} is less than 1", "give 1 or more")
    return value


def parse_names(
    option: str, text: str, known: Collection[str], aliases: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Parse a comma-separated list of names and remove repetitions.

    Args:
        option: name of the option, for messages.
        text: comma-separated names.
        known: allowed names.
        aliases: alternative words for some names.

    Raises:
        OptionError: a name is not known.
    """
    by_name = {name: name for name in known} | dict(aliases or {})
    for part in split_list(text):
        if part not in by_name:
            raise OptionError(option, f"{part!r} is not known", f"choose from {', '.join(by_name)}")
    return tuple(dict.fromkeys(by_name[part] for part in split_list(text)))


def split_list(text: str) -> list[str]:
    """Split a comma-separated list and drop empty parts."""
    return [part.strip() for part in text.split(",") if part.strip()]


def print_progress(line: str) -> None:
    """Print a progress line to standard error."""
    print(line, file=sys.stderr, flush=True)


def save_into(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a report into a folder, which is created if needed.

    Raises:
        OptionError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror})"
        raise OptionError("--output", problem, "give a writable folder") from None
