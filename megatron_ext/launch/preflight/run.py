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
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from megatron_ext.launch import local
from megatron_ext.launch.preflight.board import Board, NoResponse
from megatron_ext.launch.preflight.checks import NodeReport, check_node
from megatron_ext.launch.preflight.judge import Links, Verdict, format_bytes, judge_links, judge_nodes, pairs_to_repeat
from megatron_ext.launch.preflight.limits import Limits, add_limits, parse_limits
from megatron_ext.launch.preflight.links import (
    Link,
    Pair,
    is_hanging,
    max_seconds,
    measure_clock_offset,
    measure_link,
    ring_pairs,
    schedule_rounds,
)
from megatron_ext.utils import error_reporting, gc_control
from megatron_ext.utils.atomic_files import write_atomically
from megatron_ext.utils.errors import EXIT_USER_ERROR, UserError
from megatron_ext.utils.markdown import format_number, table

EXIT_RESTART = 3
"""Exit code if nodes are bad, or if a fault cannot be attributed to a node. The job's script then starts again, without
the bad nodes.
"""
_REPORT, _LINK = TypeAdapter(NodeReport), TypeAdapter(Link)
_ANSWER_SECONDS = 60.0
"""Time limit of an answer that needs no work. A process on a busy node may not run for several seconds."""


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
        0: train. `EXIT_RESTART`: start again.

    Raises:
        UserError: a fault is common to all nodes, or affects the only machine.
    """
    limits = parse_limits(args)
    with gc_control.frozen_imports():
        import_module("torch.distributed")
    try:
        with nullcontext() if "RANK" in os.environ else local.single_rank_environment():
            code = _run_preflight(args, limits)
    except UserError as error:
        if not is_hanging():
            raise
        error_reporting.report_user_error(str(error))
        code = EXIT_USER_ERROR
    if is_hanging():  # a hanging library call would keep the interpreter from exiting
        sys.stdout.flush()
        os._exit(code)
    return code


def _run_preflight(args: argparse.Namespace, limits: Limits) -> int:
    try:
        board = Board(limits.node_timeout)
        report = check_node(args.folder or Path.cwd())
        if board.rank:
            return _follow_orders(board, report, limits)
        preflight = _Preflight(board, report, limits, args.nodes.split(",") if args.nodes else [])
        verdict = preflight.judge()
        if args.folder:
            _write_results(args.folder / args.name, preflight, verdict)
        print("\n".join(preflight.lines(verdict)), flush=True)
        preflight.end()
        code = _exit_code(verdict)
    except NoResponse as error:
        print(f"selectron: preflight: {error}", file=sys.stderr, flush=True)
        code = EXIT_RESTART
    return code


def _exit_code(verdict: Verdict) -> int:
    refusals = list(verdict.refusals)
    if "SLURM_JOB_ID" not in os.environ:  # there are no other nodes to use
        refusals += [f"{node}: {reason}" for node, reason in verdict.bad.items()] + verdict.troubles
    if refusals:
        raise UserError("pre-flight", ", ".join(refusals), "repair it, or change its limit (selectron launch --help)")
    return 0 if verdict.passed else EXIT_RESTART


def _follow_orders(board: Board, report: NodeReport, limits: Limits) -> int:
    """Execute the orders of the first process until it sends the last one."""
    board.put(f"report/{board.rank}", asdict(report))
    # A generous limit: when the first process exits, its store closes and the wait fails.
    for order, answer in board.orders(limits.node_timeout + 100 * limits.pair_timeout):
        if order["do"] == "clock":
            board.put(answer, time.time())
        elif order["do"] == "pairs":
            board.put(answer, [asdict(link) for link in _measure_pairs(board, report, order, limits)])
        else:
            board.put(answer, "ended")
            return 0
    raise AssertionError("orders do not end by themselves")


def _measure_pairs(board: Board, report: NodeReport, order: Mapping[str, Any], limits: Limits) -> list[Link]:
    """Measure the links of this process with its partners, one after the other."""
    import torch

    device = torch.device(order["device"], report.local_rank) if order["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    links = []
    for index, nodes in enumerate(order["pairs"]):
        pair: Pair = (nodes[0], nodes[1])
        side = pair.index(report.node)
        try:
            store = board.open_view(f"{order['name']}/{pair}/{report.local_rank}", limits.pair_timeout)
            store.set(f"here{side}", "")
            # The other process may still be measuring earlier pairs, each for up to its time limit.
            store.wait([f"here{1 - side}"], timedelta(seconds=_max_total_seconds(index + 1, limits)))
        except (NoResponse, RuntimeError):
            links.append(Link(pair=pair, local_rank=report.local_rank, error="the other process does not respond"))
            continue
        links.append(measure_link(pair, report.local_rank, side, store, device, limits.pair_timeout))
    return links


def _max_total_seconds(num_rounds: int, limits: Limits) -> float:
    return num_rounds * 2 * max_seconds(limits.pair_timeout)


@dataclass
class _Preflight:
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
            good_nodes = [node for node in self.nodes if node not in verdict.bad]
            link_verdict = self._judge_links(good_nodes)
            verdict.bad.update(link_verdict.bad)
            verdict.troubles.extend(link_verdict.troubles)
            verdict.warnings.extend(link_verdict.warnings)
        self.seconds = time.monotonic() - start
        return verdict

    def _gather(self) -> None:
        size = int(os.environ["WORLD_SIZE"])
        others = {rank: f"report/{rank}" for rank in range(1, size)}
        found = self.board.gather(others, self.limits.node_timeout)
        self.reports = {0: self.report} | {rank: _REPORT.validate_python(report) for rank, report in found.items()}
        if not self.nodes:
            missing = sorted(set(range(size)) - set(self.reports))
            self.nodes = list(dict.fromkeys(report.node for _, report in sorted(self.reports.items())))
            self.nodes += [f"of ranks {','.join(map(str, missing))}"] if missing else []
        self._processes = max(1, size // len(self.nodes))

    def _compare_clocks(self) -> None:
        """Measure the clock offset of one process per node, one by one because concurrent answers would add error."""
        for rank, report in self.reports.items():
            if rank and report.local_rank == 0:

                def read_clock(rank: int = rank) -> float:
                    (key,) = self.board.order({rank: {"do": "clock"}}).values()
                    return float(self.board.wait_for(key, _ANSWER_SECONDS))

                try:
                    self.clocks[report.node] = measure_clock_offset(read_clock)
                except NoResponse:  # the link measurement will report it
                    continue

    def _judge_links(self, nodes: Sequence[str]) -> Verdict:
        first = Links.from_links(self._measure("ring", ring_pairs(nodes), nodes), self.limits)
        pairs = pairs_to_repeat(first)
        if not pairs:
            return Verdict()
        good = [link for link in self.links if link.pair in first.slowest and not first.problem(link.pair)]
        repeated = Links.from_links([*good, *self._measure("again", pairs, nodes)], self.limits)
        return judge_links(first, repeated)

    def _measure(self, name: str, pairs: Sequence[Pair], nodes: Sequence[str]) -> list[Link]:
        """Run all-reduces between the nodes of each pair. The pairs of a round run in parallel."""
        rounds = schedule_rounds(pairs)
        reports = [report for report in self.reports.values() if report.node in nodes]
        counts = {node: sum(report.node == node for report in reports) for node in nodes}
        device = "cuda" if reports and all(report.gpus_seen >= report.processes for report in reports) else "cpu"
        pairs_by_rank: dict[int, list[Pair]] = {}
        for report in reports:
            node_pairs = [pair for round_pairs in rounds for pair in round_pairs if report.node in pair]
            pairs_by_rank[report.rank] = [
                pair for pair in node_pairs if report.local_rank < min(counts[node] for node in pair)
            ]
        orders = {
            rank: {"do": "pairs", "name": name, "device": device, "pairs": node_pairs}
            for rank, node_pairs in pairs_by_rank.items()
        }
        own_order = orders.pop(0, None)
        keys = self.board.order(orders) if rounds else {}
        found = _measure_pairs(self.board, self.report, own_order, self.limits) if own_order and rounds else []
        answers = self.board.gather(keys, _max_total_seconds(len(rounds) + 1, self.limits))
        found += [_LINK.validate_python(link) for links in answers.values() for link in links]
        for report in (self.reports[rank] for rank in keys if rank not in answers):
            error = f"{report.node} no longer responds"
            found += [Link(pair=pair, local_rank=report.local_rank, error=error) for pair in pairs_by_rank[report.rank]]
        self.links += found
        return found

    def end(self) -> None:
        """Order the other processes to exit, and wait for their answers: until then they need this process's store."""
        self.board.gather(self.board.order({rank: {"do": "end"} for rank in self.reports if rank}), _ANSWER_SECONDS)

    def lines(self, verdict: Verdict) -> list[str]:
        """Return the tables of nodes and pairs, and the warnings."""
        first = {report.node: report for report in reversed(self.reports.values()) if report.local_rank == 0}
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
        pairs = Links.from_links(self.links, self.limits).slowest
        if pairs:
            cells = [
                [f"{a} - {b}", format_number(link.bandwidth), format_number(link.latency * 1e6), link.error or "ok"]
                for (a, b), link in pairs.items()
            ]
            lines += ["", *table(("slowest link of pair", "GB/s", "latency, µs", "all-reduce"), cells)]
        lines += [f"warning: {line}" for line in verdict.warnings]
        return lines

    def _row(self, node: str, report: NodeReport | None, verdict: Verdict) -> list[str]:
        result = verdict.bad.get(node, "ok")
        if report is None:
            return [node, *[""] * 8, result]
        gpus = [gpu for other in self.reports.values() if other.node == node for gpu in other.gpus]
        spaces = [format_bytes(space.free) if space.free is not None else "none" for space in report.spaces.values()]
        clock = self.clocks.get(node)
        return [
            node,
            str(report.gpus_seen),
            format_bytes(min(gpu.free for gpu in gpus)) if gpus else "",
            format_bytes(report.memory),
            *spaces,
            f"{clock[0]:+.4f} s" if clock else "",
            report.versions["code"],
            result,
        ]


def _write_results(path: Path, preflight: _Preflight, verdict: Verdict) -> None:
    """Write the results as JSON, and the notes for the job's script."""
    results = {
        "seconds": preflight.seconds,
        "limits": asdict(preflight.limits),
        "nodes": preflight.nodes,
        "reports": [asdict(report) for _, report in sorted(preflight.reports.items())],
        "clocks": {node: {"ahead": ahead, "error": error} for node, (ahead, error) in preflight.clocks.items()},
        "links": [asdict(link) for link in preflight.links],
        "verdict": asdict(verdict),
    }
    write_atomically(path.with_name(f"{path.name}.json"), (json.dumps(results, indent=1) + "\n").encode())
    notes = [f"bad node {node}: {reason}" for node, reason in verdict.bad.items()]
    notes += [f"trouble between nodes: {line}" for line in verdict.troubles]
    notes += [f"warning: {line}" for line in verdict.warnings]
    text = "".join(f"{' '.join(line.split())}\n" for line in notes)
    write_atomically(path.with_name(f"{path.name}.notes"), text.encode())
    # The job's script writes the list of excluded nodes. It also excludes nodes where no process could start.
