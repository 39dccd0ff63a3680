"""Implementation of `selectron preflight`: check every node of a job before training, and report the bad ones."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_ext.launch import local
from megatron_ext.launch.preflight.board import Board, Silence
from megatron_ext.launch.preflight.checks import NodeReport, look_around
from megatron_ext.launch.preflight.judge import Links, Verdict, amount, judge_links, judge_nodes, second_tries
from megatron_ext.launch.preflight.limits import Limits, add_limits, limits_of
from megatron_ext.launch.preflight.links import Link, Pair, hanging, longest, measure, offset, ring, rounds
from megatron_ext.utils import error_reporting
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.errors import EXIT_USER_ERROR, UserError
from megatron_ext.utils.markdown import format_number, table

EXIT_BEGIN_ANEW = 3
"""Exit code if nodes are bad, or if a fault cannot be attributed to a node. The job's script then starts again, without
the bad nodes.
"""
_REPORT, _LINK = TypeAdapter(NodeReport), TypeAdapter(Link)
_PATIENCE = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `selectron preflight`."""
    text = "folder of the job, to which NAME.json (all results) and NAME.notes (problems) are written"
    parser.add_argument("--folder", type=Path, metavar="DIR", help=text)
    parser.add_argument(
        "--name", default="preflight", metavar="NAME", help="base name of these files (default preflight)"
    )
    parser.add_argument(
        "--nodes", metavar="NAMES", help="nodes of the job, separated by commas, to name those that do not report"
    )
    add_limits(parser)


def run(args: argparse.Namespace) -> int:
    """Check the node of this process. The first process of a job also judges all nodes.

    Without RANK etc. in the environment, this machine alone is checked.

    Returns:
        0: train. `EXIT_BEGIN_ANEW`: start again.

    Raises:
        UserError: a fault is common to all nodes, or affects the only machine.
    """
    limits = limits_of(args)
    try:
        with nullcontext() if "RANK" in os.environ else local.only_rank():
            code = _fly(args, limits)
    except UserError as error:
        if not hanging():
            raise
        error_reporting.report_user_error(str(error))
        code = EXIT_USER_ERROR
    if hanging():  # a hanging library call would keep the interpreter from exiting
        sys.stdout.flush()
        os._exit(code)
    return code


def _fly(args: argparse.Namespace, limits: Limits) -> int:
    try:
        board = Board(limits.node_timeout)
        report = look_around(args.folder or Path.cwd())
        if board.rank:
            return _obey(board, report, limits)
        flight = _Flight(board, report, limits, args.nodes.split(",") if args.nodes else [])
        verdict = flight.judge()
        if args.folder:
            _leave(args.folder / args.name, flight, verdict)
        print("\n".join(flight.lines(verdict)), flush=True)
        flight.end()
        code = _conclude(verdict)
    except Silence as error:
        print(f"selectron: preflight: {error}", file=sys.stderr, flush=True)
        code = EXIT_BEGIN_ANEW
    return code


def _conclude(verdict: Verdict) -> int:
    refusals = list(verdict.refusals)
    if "SLURM_JOB_ID" not in os.environ:  # there are no other nodes to use
        refusals += [f"{node}: {reason}" for node, reason in verdict.bad.items()] + verdict.troubles
    if refusals:
        raise UserError("pre-flight", ", ".join(refusals), "repair it, or change its limit (selectron launch --help)")
    return 0 if verdict.passed else EXIT_BEGIN_ANEW


def _obey(board: Board, report: NodeReport, limits: Limits) -> int:
    """Execute the orders of the first process until it sends the last one."""
    board.put(f"report/{board.rank}", asdict(report))
    # A generous limit: when the first process exits, its store closes and the wait fails.
    for order, answer in board.orders(limits.node_timeout + 100 * limits.pair_timeout):
        if order["do"] == "clock":
            board.put(answer, time.time())
        elif order["do"] == "pairs":
            board.put(answer, [asdict(link) for link in _talk(board, report, order, limits)])
        else:
            board.put(answer, "ended")
            return 0
    raise AssertionError("orders do not end by themselves")


def _talk(board: Board, report: NodeReport, order: Mapping[str, Any], limits: Limits) -> list[Link]:
    """Measure the links of this process with its partners, one after the other."""
    import torch

    device = torch.device(order["device"], report.local_rank) if order["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    links = []
    for turn, nodes in enumerate(order["pairs"]):
        pair: Pair = (nodes[0], nodes[1])
        end = pair.index(report.node)
        try:
            store = board.part(f"{order['name']}/{pair}/{report.local_rank}", limits.pair_timeout)
            store.set(f"here{end}", "")
            # The other process may still be measuring earlier pairs, each for up to its time limit.
            store.wait([f"here{1 - end}"], timedelta(seconds=_longest(turn + 1, limits)))
        except (Silence, RuntimeError):
            links.append(Link(pair=pair, local_rank=report.local_rank, error="the other process does not respond"))
            continue
        links.append(measure(pair, report.local_rank, end, store, device, limits.pair_timeout))
    return links


def _longest(turns: int, limits: Limits) -> float:
    return turns * 2 * longest(limits.pair_timeout)


@dataclass
class _Flight:
    """Results and actions of the first process.

    Args:
        board: communication with the other processes.
        report: report of the first process itself.
        limits: requirements for a node.
        nodes: names of the job's nodes; empty if unknown.
    """

    board: Board
    report: NodeReport
    limits: Limits
    nodes: list[str]
    reports: dict[int, NodeReport] = field(default_factory=dict)
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    seconds: float = 0.0

    def judge(self) -> Verdict:
        """Gather the reports, measure clocks and links, and judge the nodes."""
        start = time.monotonic()
        self._gather()
        self._compare_clocks()
        verdict = judge_nodes(self.nodes, self._processes, self.reports.values(), self.clocks, self.limits)
        if not verdict.refusals:
            fit = [node for node in self.nodes if node not in verdict.bad]
            more = self._judge_links(fit)
            verdict.bad.update(more.bad)
            verdict.troubles.extend(more.troubles)
            verdict.warnings.extend(more.warnings)
        self.seconds = time.monotonic() - start
        return verdict

    def _gather(self) -> None:
        size = int(os.environ["WORLD_SIZE"])
        others = {rank: f"report/{rank}" for rank in range(1, size)}
        found = self.board.gather(others, self.limits.node_timeout)
        self.reports = {0: self.report} | {rank: _REPORT.validate_python(one) for rank, one in found.items()}
        if not self.nodes:
            silent = sorted(set(range(size)) - set(self.reports))
            self.nodes = list(dict.fromkeys(one.node for _, one in sorted(self.reports.items())))
            self.nodes += [f"of ranks {','.join(map(str, silent))}"] if silent else []
        self._processes = max(1, size // len(self.nodes))

    def _compare_clocks(self) -> None:
        """Measure the clock offset of one process per node, one by one because concurrent answers would add error."""
        for rank, report in self.reports.items():
            if rank and report.local_rank == 0:

                def ask(rank: int = rank) -> float:
                    (key,) = self.board.order({rank: {"do": "clock"}}).values()
                    return float(self.board.take(key, _PATIENCE))

                try:
                    self.clocks[report.node] = offset(ask)
                except Silence:  # the link measurement will report it
                    continue

    def _judge_links(self, nodes: Sequence[str]) -> Verdict:
        first = Links.of(self._measure("ring", ring(nodes), nodes), self.limits)
        tries = second_tries(first)
        if not tries:
            return Verdict()
        good = [link for link in self.links if link.pair in first.slowest and not first.problem(link.pair)]
        again = Links.of([*good, *self._measure("again", tries, nodes)], self.limits)
        return judge_links(first, again)

    def _measure(self, name: str, pairs: Sequence[Pair], nodes: Sequence[str]) -> list[Link]:
        """Run all-reduces between the nodes of each pair. The pairs of a round run in parallel."""
        turns = rounds(pairs)
        there = [one for one in self.reports.values() if one.node in nodes]
        counts = {node: sum(one.node == node for one in there) for node in nodes}
        device = "cuda" if there and all(one.gpus_seen >= one.processes for one in there) else "cpu"
        mine: dict[int, list[Pair]] = {}
        for one in there:
            near = [pair for turn in turns for pair in turn if one.node in pair]
            mine[one.rank] = [pair for pair in near if one.local_rank < min(counts[node] for node in pair)]
        orders = {rank: {"do": "pairs", "name": name, "device": device, "pairs": near} for rank, near in mine.items()}
        own = orders.pop(0, None)
        keys = self.board.order(orders) if turns else {}
        found = _talk(self.board, self.report, own, self.limits) if own and turns else []
        answers = self.board.gather(keys, _longest(len(turns) + 1, self.limits))
        found += [_LINK.validate_python(link) for links in answers.values() for link in links]
        for report in (self.reports[rank] for rank in keys if rank not in answers):
            error = f"{report.node} no longer responds"
            found += [Link(pair=pair, local_rank=report.local_rank, error=error) for pair in mine[report.rank]]
        self.links += found
        return found

    def end(self) -> None:
        """Order the other processes to exit, and wait for their answers: until then they need this process's store."""
        self.board.gather(self.board.order({rank: {"do": "end"} for rank in self.reports if rank}), _PATIENCE)

    def lines(self, verdict: Verdict) -> list[str]:
        """Return the tables of nodes and pairs, and the warnings."""
        first = {one.node: one for one in reversed(self.reports.values()) if one.local_rank == 0}
        rows = [self._row(node, first.get(node), verdict) for node in self.nodes]
        columns = (
            "node",
            "GPUs",
            "min. free GPU memory",
            "memory",
            "run",
            "temporary",
            "shared memory",
            "clock",
            "code",
        )
        lines = [f"pre-flight of {len(self.nodes)} nodes in {self.seconds:.1f} s", *table((*columns, "verdict"), rows)]
        pairs = Links.of(self.links, self.limits).slowest
        if pairs:
            cells = [
                [f"{a} - {b}", format_number(link.bandwidth), format_number(link.latency * 1e6), link.error or "ok"]
                for (a, b), link in pairs.items()
            ]
            lines += ["", *table(("slowest link of pair", "GB/s", "latency, µs", "all-reduce"), cells)]
        lines += [f"warning: {line}" for line in verdict.warnings]
        return lines

    def _row(self, node: str, report: NodeReport | None, verdict: Verdict) -> list[str]:
        said = verdict.bad.get(node, "ok")
        if report is None:
            return [node, *[""] * 8, said]
        gpus = [gpu for one in self.reports.values() if one.node == node for gpu in one.gpus]
        spaces = [amount(space.free) if space.free is not None else "none" for space in report.spaces.values()]
        ahead = self.clocks.get(node)
        return [
            node,
            str(report.gpus_seen),
            amount(min(gpu.free for gpu in gpus)) if gpus else "",
            amount(report.memory),
            *spaces,
            f"{ahead[0]:+.4f} s" if ahead else "",
            report.versions["code"],
            said,
        ]


def _leave(path: Path, flight: _Flight, verdict: Verdict) -> None:
    """Write the results as JSON, and the notes for the job's script."""
    found = {
        "seconds": flight.seconds,
        "limits": asdict(flight.limits),
        "nodes": flight.nodes,
        "reports": [asdict(one) for _, one in sorted(flight.reports.items())],
        "clocks": {node: {"ahead": ahead, "error": error} for node, (ahead, error) in flight.clocks.items()},
        "links": [asdict(link) for link in flight.links],
        "verdict": asdict(verdict),
    }
    write_atomically(path.with_name(f"{path.name}.json"), (json.dumps(found, indent=1) + "\n").encode())
    notes = [f"bad node {node}: {reason}" for node, reason in verdict.bad.items()]
    notes += [f"trouble between nodes: {line}" for line in verdict.troubles]
    notes += [f"warning: {line}" for line in verdict.warnings]
    text = "".join(f"{' '.join(line.split())}\n" for line in notes)
    write_atomically(path.with_name(f"{path.name}.notes"), text.encode())
    # The job's script writes the list of excluded nodes. It also excludes nodes where no process could start.
