"""Entry point of the `selectron` command: parses the arguments of a sub-command and calls its module.

A sub-command's module is imported only when it runs, so that help appears at once.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ext.commands import quiet
from megatron_ext.utils import error_reporting, gc_control
from megatron_ext.utils.cli_parser import Parser
from megatron_ext.utils.errors import EXIT_STOPPED, EXIT_USER_ERROR, UserError
from megatron_ext.utils.printable import escaped_output
from megatron_ext.utils.resume_option import add_resume

if TYPE_CHECKING:
    from megatron_ext.config.schema import RunConfig
    from megatron_ext.config.traits import Mixers

EXIT_INTERRUPTED = 130
TRIAL_STEPS = 5  # of --trial by default; the first two include compilation and allocation
EXIT_NO_READER = 141  # a shell's exit code for SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: arguments after `selectron`; None: those of this process.

    Returns:
        0: done. 2: user error, printed as one line. 75: stopped on request, can be resumed. 130: interrupted. 141: the
        reader of standard output is gone. Any other failure is an exception of ours.
    """
    gc_control.process_is_ours(arguments is None)
    quiet.hush_libraries()
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
        if isinstance(error, BrokenPipeError) and _has_lost_its_reader():
            return EXIT_NO_READER
        if refusal := error_reporting.disk_refusal(error):
            error_reporting.report_user_error(str(refusal))
            return EXIT_USER_ERROR
        # A rank that exits with a user error closes its connections, which raises exceptions in its peers.
        if error_reporting.reported_by_another():
            return EXIT_USER_ERROR
        if error_reporting.has_peers():
            _end_at_once()
        raise


def _has_lost_its_reader() -> bool:
    """Return whether the reader of standard output is gone, as after `| head`; if so, discard the remaining output."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    lost = any(event & select.POLLERR for _, event in output.poll(0))
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return lost


def _end_at_once() -> NoReturn:
    """Print the traceback and exit at once: threads of communication libraries may never end while peers wait."""
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)


@dataclass(frozen=True, kw_only=True)
class _Verb:
    """Sub-command: its line in the help, its arguments, and its function."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Sequence[str]], int]


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
        epilog="commands:\n" + "\n".join(f"  {name:<10}{verb.help}" for name, verb in VERBS.items()) + _EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="store_true", help="print the version and exit")
    top.add_argument("verb", metavar="COMMAND", help="command to run; `selectron COMMAND --help` lists its arguments")
    if arguments[:1] == ["--version"]:
        from megatron_ext.commands import version

        return version.run()
    if not arguments:
        top.error(f"a command is missing ({', '.join(VERBS)})")
    chosen = top.parse_args(arguments[:1]).verb
    verb = VERBS.get(chosen) or _no_such_verb(chosen)
    parser = Parser(prog=f"selectron {chosen}", description=verb.help, allow_abbrev=False)
    verb.add_arguments(parser)
    return verb.run(parser.parse_args(arguments[1:]), arguments[1:])


def _no_such_verb(name: str) -> NoReturn:
    from megatron_ext.config.suggest import suggest

    raise UserError(name, "no such command", f"{suggest(name, VERBS)} (selectron --help)")


# --- train -----------------------------------------------------------------------------------------------------------


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; see examples/")
    override = "override of a field, e.g. training.steps=200, or a YAML file with overrides"
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=override)


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--processes", type=int, metavar="N", help="processes to start on this machine (default 1)")
    add_resume(parser, "continue from the run's newest checkpoint")
    parser.add_argument("--from-step", type=int, metavar="N", help="continue from the checkpoint of this step")
    trial = f"train only N steps (default {TRIAL_STEPS}) in a separate folder and report throughput and memory"
    parser.add_argument("--trial", type=int, nargs="?", const=TRIAL_STEPS, metavar="N", help=trial)
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")


def _train(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    processes = _world_size(args.processes)
    whole = config = _checked_config(args, processes)
    if args.trial is not None:
        config = _trial(args, whole, processes)
    if args.print_config:
        from megatron_ext.config.save import to_yaml

        sys.stdout.write(to_yaml(config))
        return 0

    def train_here() -> int:
        with gc_control.unlooked_for():
            from megatron_ext.training.run import train

        trial_of = None if args.trial is None else whole
        finished = train(config, resume=args.resume, from_step=args.from_step, trial_of=trial_of)
        return 0 if finished else error_reporting.stopped_code()

    return _as_ranks("train", arguments, processes, train_here)


def _trial(args: argparse.Namespace, whole: RunConfig, processes: int | None) -> RunConfig:
    """Return the configuration of a trial, after the same checks as that of a run."""
    from megatron_ext.config.trial import trial_config

    if args.resume or args.from_step is not None:
        raise UserError("--trial", "a trial starts from initial weights", "omit --resume and --from-step")
    config = trial_config(whole, args.trial)
    _check(config, processes)
    return config


def _as_ranks(verb: str, arguments: Sequence[str], processes: int | None, work: Callable[[], int | None]) -> int:
    """Run a rank's work: here if this process is a rank or the only one, else in as many processes as requested."""
    if "RANK" not in os.environ:
        from megatron_ext.launch import local

        if processes and processes > 1:
            return local.launch(local.rank_command(verb, arguments), processes)
        with local.only_rank():
            return work() or 0
    return work() or 0


def _world_size(asked: int | None) -> int | None:
    """Return the number of processes of the run: from torchrun's environment, or as requested."""
    if asked is not None and asked < 1:
        raise UserError("--processes", f"{asked} is less than 1", "give 1 or more")
    if "RANK" not in os.environ:
        return asked
    there = int(os.environ.get("WORLD_SIZE", "1"))
    if asked is not None and asked != there:
        raise UserError(
            "--processes", f"{asked} differs from the {there} that the launcher has started", "omit the option"
        )
    return there


def _checked_config(args: argparse.Namespace, processes: int | None) -> RunConfig:
    # --print-config starts no process. Without a number of them, check for one replica of the model.
    return _config(args.config, args.overrides, processes or (None if args.print_config else 1))


def _config(path: Path, overrides: Sequence[str], processes: int | None) -> RunConfig:
    """Load and check a configuration for a number of processes; None: as many as one replica of the model needs."""
    config = _load(path, overrides)
    _check(config, processes)
    return config


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    from megatron_ext.config.load import load_config

    return load_config(path, overrides, _mixers())


def _check(config: RunConfig, processes: int | None) -> None:
    from megatron_ext.config.layout import model_parallel_size
    from megatron_ext.config.rules import check
    from megatron_ext.evaluation.registry import check_suites

    check(config, model_parallel_size(config.parallel) if processes is None else processes, _mixers())
    check_suites(config)


def _mixers() -> Mixers:
    with gc_control.unlooked_for():
        from megatron_ext.platform.device import before_megatron

        before_megatron()
        from megatron_ext.mixers.core.registry import load_all

        return load_all()


# --- launch, sweep, status, logs, cancel, preflight ------------------------------------------------------------------


def _add_launch(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import launch as command

    _add_config(parser)
    command.add_launch(parser)


def _launch(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import launch as command

    config = _config(args.config, args.overrides, command.world_size(args))

    def check_can_start() -> None:
        from megatron_ext.training import starting

        starting.check_can_start(config, args.resume)

    return command.launch(args, config, check_can_start)


def _of_status(name: str) -> Callable[..., Any]:
    """Return a function of `commands.status` that is imported on its first call."""

    def call(given: Any, *_: Any) -> Any:
        from megatron_ext.commands import status as status_command

        return getattr(status_command, name)(given)

    return call


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import launch as command

    command.add_sweep(parser)


def _sweep(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import launch as command
    from megatron_ext.planning.sweep import run_table, sweep_runs

    processes = command.world_size(args)
    runs = sweep_runs(args.sweep, args.overrides, _load, lambda config: _check(config, processes), listed=args.dry_run)
    return command.sweep(args, {name: run.config for name, run in runs.items()}, run_table(runs))


def _add_preflight(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.launch.preflight import run as preflight

    preflight.add_preflight(parser)


def _preflight(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.launch.preflight import run as preflight

    return preflight.preflight(args)


# --- prepare ---------------------------------------------------------------------------------------------------------


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    from data_prep import cli

    cli.add_arguments(parser)


def _prepare(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from data_prep import cli

    return cli.run(args)


# --- report ----------------------------------------------------------------------------------------------------------


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run folders to compare, or folders of run folders"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="output folder of the report")
    parser.add_argument("--fit", action="store_true", help="also fit scaling laws to the runs, as `selectron fit` does")


def _report(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.analysis.report import write_report

    write_report(args.runs, args.output, fit=args.fit, say=print)
    return 0


# --- fit -------------------------------------------------------------------------------------------------------------


def _add_fit(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import fit as command

    command.add_arguments(parser)


def _fit(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import fit as command

    return command.run(args)


# --- generate --------------------------------------------------------------------------------------------------------


def _add_generate(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import generate

    generate.add_arguments(parser)


def _generate(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import generate

    return generate.run(args)


# --- evaluate --------------------------------------------------------------------------------------------------------


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import evaluate

    evaluate.add_arguments(parser)


def _evaluate(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import evaluate

    return _as_ranks("evaluate", arguments, _world_size(args.processes), evaluate.work(args))


# --- convert, inspect ------------------------------------------------------------------------------------------------


def _add_convert(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import convert as command

    command.add_arguments(parser)


def _convert(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import convert as command

    return command.run(args)


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import inspect as report

    report.add_arguments(parser)


def _inspect(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import inspect as report

    return report.run(args)


# --- plan ------------------------------------------------------------------------------------------------------------


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import plan as plan_command

    _add_config(parser)
    plan_command.add_arguments(parser)


def _plan(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import plan as plan_command

    return plan_command.run(args, _load, _mixers)


# --- bench -----------------------------------------------------------------------------------------------------------


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from megatron_ext.commands import bench as command

    command.add_arguments(parser)


def _bench(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import bench as command

    return command.run(args)


# --- doctor ----------------------------------------------------------------------------------------------------------


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    """Add no arguments."""


def _doctor(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    from megatron_ext.commands import doctor

    return doctor.run()


VERBS = {
    "train": _Verb(help="train a model from a configuration", add_arguments=_add_train, run=_train),
    "launch": _Verb(
        help="train as a Slurm job that is requeued until the run is finished", add_arguments=_add_launch, run=_launch
    ),
    "sweep": _Verb(help="launch many runs that differ in some fields", add_arguments=_add_sweep, run=_sweep),
    "status": _Verb(help="show the state of runs", add_arguments=_of_status("add_status"), run=_of_status("status")),
    "logs": _Verb(help="show the output of a run", add_arguments=_of_status("add_logs"), run=_of_status("logs")),
    "cancel": _Verb(
        help="cancel the jobs of launched runs", add_arguments=_of_status("add_runs"), run=_of_status("cancel")
    ),
    "preflight": _Verb(help="check the nodes of a job before training", add_arguments=_add_preflight, run=_preflight),
    "prepare": _Verb(help="tokenise documents into shards", add_arguments=_add_prepare, run=_prepare),
    "report": _Verb(help="compare runs at equal training loss", add_arguments=_add_report, run=_report),
    "fit": _Verb(help="fit a scaling law to runs of many sizes", add_arguments=_add_fit, run=_fit),
    "generate": _Verb(help="continue a text with a trained model", add_arguments=_add_generate, run=_generate),
    "evaluate": _Verb(help="evaluate a trained model", add_arguments=_add_evaluate, run=_evaluate),
    "convert": _Verb(help="convert a checkpoint to another format", add_arguments=_add_convert, run=_convert),
    "inspect": _Verb(help="describe a checkpoint", add_arguments=_add_inspect, run=_inspect),
    "plan": _Verb(
        help="estimate memory and time of a configuration on GPUs, without using any",
        add_arguments=_add_plan,
        run=_plan,
    ),
    "bench": _Verb(
        help="measure kernels, layers, training steps, checkpoints or data",
        add_arguments=_add_bench,
        run=_bench,
    ),
    "doctor": _Verb(
        help="show installed versions, the device and the kernels in use", add_arguments=_add_doctor, run=_doctor
    ),
}

if __name__ == "__main__":
    sys.exit(main())
