"""Entry point of the `selectron` command: parses the arguments of a sub-command and calls its module.

A sub-command's module is imported only when it runs, so that help appears at once.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, NoReturn

from megatron_ext.commands import quiet
from megatron_ext.utils import error_reporting, gc_control
from megatron_ext.utils.cli_parser import Parser
from megatron_ext.utils.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from megatron_ext.utils.printable import escaped_output

EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141  # a shell's exit code for SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: arguments after `selectron`; None: those of this process.

    Returns:
        0: done. 2: user error, printed as one line. 75: stopped on request, can be resumed. 130: interrupted. 141: the
        reader of standard output is gone. Any other failure is an exception of ours.
    """
    gc_control.set_process_owned(arguments is None)
    quiet.ignore_library_warnings()
    with escaped_output():
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    try:
        code = _dispatch(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()  # here, where a broken pipe is handled
        return code
    except UserError as error:
        error_reporting.report_user_error(str(error))
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _is_output_closed():
            return EXIT_NO_READER
        if refusal := error_reporting.disk_error(error):
            error_reporting.report_user_error(str(refusal))
            return EXIT_USER_ERROR
        # A rank that exits with a user error closes its connections, which raises exceptions in its peers.
        if error_reporting.is_reported_by_other_rank():
            return EXIT_USER_ERROR
        if error_reporting.has_peers():
            _exit_with_traceback()
        raise


def _is_output_closed() -> bool:
    """Return True if the reader of standard output is gone, as after `| head`, and discard the remaining output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    is_closed = any(event & select.POLLERR for _, event in output.poll(0))
    if is_closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_closed


def _exit_with_traceback() -> NoReturn:
    """Print the traceback and exit at once: threads of communication libraries may never end while peers wait."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


class _Command(NamedTuple):
    """Sub-command.

    Attributes:
        help: line about it in the help.
        module: name of a module that defines `add_arguments(parser)` and `run(args)`, which returns an exit code.
            `args.command_line` is the list of unparsed arguments.
    """

    help: str
    module: str


_EXIT_CODES = f"""

exit codes:
  0         success; for train: the run is finished
  {EXIT_USER_ERROR}         user error, reported in one line
  {EXIT_STOPPED}        train, launch --local, sweep --local, prepare: stopped on request
            (SIGTERM, Ctrl-C), can be resumed
  {EXIT_INTERRUPTED}       interrupted
"""


def _dispatch(arguments: list[str]) -> int:
    top = Parser(
        prog="selectron",
        description="Pre-training for comparing sequence mixers.",
        epilog="commands:\n"
        + "\n".join(f"  {name:<10}{command.help}" for name, command in COMMANDS.items())
        + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    top.add_argument(
        "command", metavar="COMMAND", help="command to run; `selectron COMMAND --help` lists its arguments"
    )
    if arguments[:1] == ["--version"]:
        from megatron_ext.commands import version

        return version.run()
    if not arguments:
        top.error(f"a command is missing ({', '.join(COMMANDS)})")
    name = top.parse_args(arguments[:1]).command
    command = COMMANDS.get(name) or _reject_unknown(name)
    module = import_module(command.module)
    parser = Parser(prog=f"selectron {name}", description=command.help, allow_abbrev=False)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(arguments[1:], argparse.Namespace(command_line=arguments[1:])))
    return code


def _reject_unknown(name: str) -> NoReturn:
    from megatron_ext.config.suggest import suggest

    raise UserError(name, "no such command", f"{suggest(name, COMMANDS)} (selectron --help)")


_PACKAGE = "megatron_ext.commands"
COMMANDS = {
    "train": _Command("train a model from a configuration", f"{_PACKAGE}.train"),
    "launch": _Command("train as a Slurm job that is requeued until the run is finished", f"{_PACKAGE}.launch"),
    "sweep": _Command("launch many runs that differ in some fields", f"{_PACKAGE}.sweep"),
    "status": _Command("show the state of runs", f"{_PACKAGE}.status"),
    "logs": _Command("show the output of a run", f"{_PACKAGE}.logs"),
    "cancel": _Command("cancel the jobs of launched runs", f"{_PACKAGE}.cancel"),
    "preflight": _Command("check the nodes of a job before training", "megatron_ext.launch.preflight.run"),
    "prepare": _Command("tokenise documents into shards", "data_prep.cli"),
    "report": _Command("compare runs at equal training loss", f"{_PACKAGE}.report"),
    "fit": _Command("fit a scaling law to runs of many sizes", f"{_PACKAGE}.fit"),
    "generate": _Command("continue a text with a trained model", f"{_PACKAGE}.generate"),
    "evaluate": _Command("evaluate a trained model", f"{_PACKAGE}.evaluate"),
    "convert": _Command("convert a checkpoint to another format", f"{_PACKAGE}.convert"),
    "inspect": _Command("describe a checkpoint", f"{_PACKAGE}.inspect"),
    "plan": _Command("estimate memory and time of a configuration on GPUs, without using any", f"{_PACKAGE}.plan"),
    "bench": _Command("measure kernels, layers, training steps, checkpoints or data", f"{_PACKAGE}.bench"),
    "doctor": _Command("show installed versions, the device and the kernels in use", f"{_PACKAGE}.doctor"),
}

if __name__ == "__main__":
    sys.exit(main())
