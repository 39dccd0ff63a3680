"""Verdict on the nodes of a job from the reports of their processes and the measurements of their links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from megatron_ext.launch.preflight.checks import NodeReport
from megatron_ext.launch.preflight.limits import Limits
from megatron_ext.launch.preflight.links import Link, Pair

RUN_FOLDER = "the run's folder"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Verdict on the nodes of a job.

    Attributes:
        bad: nodes to exclude, with the reason.
        troubles: faults that cannot be attributed to a node. The job starts again.
        refusals: faults common to all nodes. The job ends, because another start would have the same faults.
        warnings: faults that do not prevent training.
    """

    bad: dict[str, str] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if the job can train."""
        return not (self.bad or self.troubles or self.refusals)


def judge_nodes(
    nodes: Sequence[str],
    processes: int,
    reports: Iterable[NodeReport],
    clocks: Mapping[str, tuple[float, float]],
    limits: Limits,
) -> Verdict:
    """Judge each node by the reports of its processes.

    A node is bad if it fails a check. A check that fails on every node is a refusal. With a single node, only a failed
    check of the run folder is a refusal.

    A node is also bad if processes of it sent no report. If only the first node reported, and there are at least two
    others, the first node is bad instead, because the others probably could not reach it.

    Args:
        nodes: names of the job's nodes, beginning with the node of rank 0.
        processes: expected number of processes per node.
        reports: reports of the processes that sent one.
        clocks: by node, offset in seconds from the first node's clock (positive: ahead), and the offset's error bound.
        limits: requirements for a node.
    """
    by_node: dict[str, list[NodeReport]] = {node: [] for node in nodes}
    for report in sorted(reports, key=lambda one: one.rank):
        by_node.setdefault(report.node, []).append(report)
    found = _silent(by_node, processes, limits)
    speaking = {node: there for node, there in by_node.items() if there and node not in found}
    gpus = max(
        (one.gpus_asked or min(one.gpus_seen, one.processes) for all_ in speaking.values() for one in all_), default=0
    )
    usual = _usual_versions(speaking)
    failed: dict[str, dict[str, str]] = {}  # check -> node -> problem
    for node, there in speaking.items():
        for check, problem in _problems(there, clocks.get(node), gpus, usual, limits):
            failed.setdefault(check, {}).setdefault(node, problem)
    verdict = Verdict(bad=found)
    for check, where in failed.items():
        everywhere = len(where) == len(speaking) and (len(speaking) > 1 or check == RUN_FOLDER)
        if everywhere:
            verdict.refusals.append(next(iter(where.values())) + (" on every node" if len(speaking) > 1 else ""))
            continue
        for node, problem in where.items():
            verdict.bad[node] = f"{verdict.bad[node]}, {problem}" if node in verdict.bad else problem
    return verdict


def _silent(by_node: Mapping[str, Sequence[NodeReport]], processes: int, limits: Limits) -> dict[str, str]:
    """Return the nodes blamed for processes without a report."""
    silent = {node: processes - len(there) for node, there in by_node.items() if len(there) < processes}
    first = next(iter(by_node))
    if first not in silent and len(silent) == len(by_node) - 1 > 1 and set(silent.values()) == {processes}:
        return {first: f"no other node reached it within {limits.node_timeout:.0f} s"}
    said = f"sent no report within {limits.node_timeout:.0f} s"
    return {node: said if n == processes else f"{n} of its {processes} processes {said}" for node, n in silent.items()}


def _problems(
    reports: Sequence[NodeReport],
    clock: tuple[float, float] | None,
    gpus: int,
    usual: Mapping[str, str],
    limits: Limits,
) -> Iterator[tuple[str, str]]:
    """Yield the checks that a node fails, each with the problem."""
    yield from _of_gpus(reports, gpus, limits)
    if reports[0].memory < limits.min_memory:
        yield "memory", f"{amount(reports[0].memory)} of memory is free, less than {amount(limits.min_memory)}"
    yield from _of_spaces(reports[0], limits)
    if clock is not None and abs(clock[0]) - clock[1] > limits.max_clock_offset:
        how = f"{abs(clock[0]):.1f} s {'ahead of' if clock[0] > 0 else 'behind'} the first node's"
        yield "clock", f"its clock is {how}, more than {limits.max_clock_offset:g} s"
    for one in reports:
        for name in sorted({*usual, *one.versions}):
            here, there = one.versions.get(name, "none"), usual.get(name, "none")
            if here != there:
                yield f"version of {name}", f"{name} is {here}, but {there} on the other nodes"


def _of_gpus(reports: Sequence[NodeReport], gpus: int, limits: Limits) -> Iterator[tuple[str, str]]:
    seen = min(one.gpus_seen for one in reports)
    if seen < gpus:
        yield "GPUs", f"{seen} of {gpus} GPUs are visible"
    for gpu in (gpu for one in reports for gpu in one.gpus):
        if gpu.error:
            yield "GPU", f"GPU {gpu.index}: {gpu.error}"
        elif gpu.free < limits.min_gpu_memory * gpu.total:
            there = f"{amount(gpu.free)} of {amount(gpu.total)} free"
            yield "GPU memory", f"GPU {gpu.index}: {there}, less than {limits.min_gpu_memory:.0%}"


def _of_spaces(report: NodeReport, limits: Limits) -> Iterator[tuple[str, str]]:
    least = {"run": limits.min_disk, "temporary": limits.min_tmp, "shared memory": limits.min_shm}
    for use, space in report.spaces.items():
        check = RUN_FOLDER if use == "run" else use
        if space.free is None:
            yield check, f"there is no folder {space.path}"
        elif space.free < least[use]:
            yield check, f"{amount(space.free)} free in {space.path}, less than {amount(least[use])}"


def _usual_versions(speaking: Mapping[str, Sequence[NodeReport]]) -> dict[str, str]:
    """Return the most common version of each component. Among equally common versions, the first node's wins."""
    reports = [one for there in speaking.values() for one in there]
    names = {name for one in reports for name in one.versions}
    counts = {name: Counter(one.versions.get(name, "none") for one in reports) for name in names}
    return {name: count.most_common(1)[0][0] for name, count in counts.items()}


def amount(size: float) -> str:
    """Format a number of bytes with a decimal unit."""
    for unit, bytes_ in (("TB", 1e12), ("GB", 1e9)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size / 1e6:.3g} MB"


@dataclass(frozen=True)
class Links:
    """Pairs of nodes, each with its slowest link.

    Args:
        slowest: by pair, the slowest link over all local ranks.
        limits: limits below which a link is slow.
    """

    slowest: dict[Pair, Link]
    limits: Limits

    @staticmethod
    def of(links: Iterable[Link], limits: Limits) -> Links:
        """Keep the slowest link of each pair; a failed link counts as slowest."""
        slowest: dict[Pair, Link] = {}
        for link in links:
            before = slowest.get(link.pair)
            if before is None or _speed(link) < _speed(before):
                slowest[link.pair] = link
        return Links(slowest, limits)

    def problem(self, pair: Pair) -> str:
        """Return the problem of a pair, or an empty string."""
        link = self.slowest[pair]
        if link.error:
            return f"no all-reduce ({link.error})"
        others = [other.bandwidth for key, other in self.slowest.items() if key != pair and not other.error]
        least = max(self.limits.min_bandwidth, self.limits.min_bandwidth_fraction * median(others) if others else 0)
        if link.bandwidth < least:
            return f"{link.bandwidth:.3g} GB/s, less than {least:.3g}"
        return ""

    def failed(self, pair: Pair) -> bool:
        """Return True if the all-reduce of a pair failed."""
        return bool(self.slowest[pair].error)

    def suspects(self) -> list[Pair]:
        """Return the pairs with a problem."""
        return [pair for pair in self.slowest if self.problem(pair)]

    def good_nodes(self) -> list[str]:
        """Return the nodes with at least one pair without a problem."""
        good = [pair for pair in self.slowest if not self.problem(pair)]
        return list(dict.fromkeys(node for pair in good for node in pair))


def _speed(link: Link) -> float:
    return -1.0 if link.error else link.bandwidth


def second_tries(first: Links) -> list[Pair]:
    """Return the pairs to measure after the ring; empty if no pair has a problem.

    All suspect pairs are measured again. In addition, a node without a good pair is measured with a good node, if there
    is a good node with which it does not form a suspect pair.
    """
    suspects, good = first.suspects(), first.good_nodes()
    lonely = [node for node in dict.fromkeys(node for pair in suspects for node in pair) if node not in good]
    more = []
    for i, node in enumerate(lonely):
        strangers = [other for other in good if not any({node, other} == set(pair) for pair in suspects)]
        if strangers:
            more.append((strangers[i % len(strangers)], node))
    return [*more, *suspects]


def judge_links(first: Links, again: Links) -> Verdict:
    """Judge nodes by the measurements of their pairs.

    A node is bad if it has no good pair in either measurement. If an all-reduce fails between two nodes that both have
    good pairs with other nodes, the second node is bad, because the job can run without it. If no pair is good, no node
    can be blamed, and a failed pair is a trouble. A pair that is only slow causes a warning unless one of its nodes is
    bad.

    Args:
        first: pairs of the ring.
        again: pairs of `second_tries`, and the good pairs of the ring for comparison.
    """
    verdict = Verdict()
    good = {*first.good_nodes(), *again.good_nodes()}
    for pair in dict.fromkeys([*first.suspects(), *again.suspects()]):
        problem = again.problem(pair) if pair in again.slowest else first.problem(pair)
        lonely = [node for node in pair if node not in good]
        said = f"{pair[0]} and {pair[1]}: {problem}"
        if not problem:
            verdict.warnings.append(f"{pair[0]} and {pair[1]}: {first.problem(pair)} at first, normal when repeated")
        elif good and lonely:
            for node in lonely:
                verdict.bad.setdefault(node, f"with {pair[pair[0] == node]}: {problem}")
        elif not again.failed(pair):
            verdict.warnings.append(said)
        elif good:
            verdict.bad.setdefault(pair[1], f"with {pair[0]}, although both reach other nodes: {problem}")
        else:
            verdict.troubles.append(f"{said}; the faulty node cannot be determined")
    return verdict
