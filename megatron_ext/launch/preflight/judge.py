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
    for report in sorted(reports, key=lambda report: report.rank):
        by_node.setdefault(report.node, []).append(report)
    missing = _blame_missing_reports(by_node, processes, limits)
    reporting = {node: node_reports for node, node_reports in by_node.items() if node_reports and node not in missing}
    all_reports = [report for node_reports in reporting.values() for report in node_reports]
    gpus = max((report.gpus_asked or min(report.gpus_seen, report.processes) for report in all_reports), default=0)
    common_versions = _common_versions(reporting)
    failed: dict[str, dict[str, str]] = {}  # check -> node -> problem
    for node, node_reports in reporting.items():
        for check, problem in _problems(node_reports, clocks.get(node), gpus, common_versions, limits):
            failed.setdefault(check, {}).setdefault(node, problem)
    verdict = Verdict(bad=missing)
    for check, problems in failed.items():
        is_everywhere = len(problems) == len(reporting) and (len(reporting) > 1 or check == RUN_FOLDER)
        if is_everywhere:
            verdict.refusals.append(next(iter(problems.values())) + (" on every node" if len(reporting) > 1 else ""))
            continue
        for node, problem in problems.items():
            verdict.bad[node] = f"{verdict.bad[node]}, {problem}" if node in verdict.bad else problem
    return verdict


def _blame_missing_reports(
    by_node: Mapping[str, Sequence[NodeReport]], processes: int, limits: Limits
) -> dict[str, str]:
    """Return the nodes blamed for processes without a report."""
    missing = {node: processes - len(reports) for node, reports in by_node.items() if len(reports) < processes}
    first = next(iter(by_node))
    if first not in missing and len(missing) == len(by_node) - 1 > 1 and set(missing.values()) == {processes}:
        return {first: f"no other node reached it within {limits.node_timeout:.0f} s"}
    reason = f"sent no report within {limits.node_timeout:.0f} s"
    return {
        node: reason if count == processes else f"{count} of its {processes} processes {reason}"
        for node, count in missing.items()
    }


def _problems(
    reports: Sequence[NodeReport],
    clock: tuple[float, float] | None,
    gpus: int,
    common_versions: Mapping[str, str],
    limits: Limits,
) -> Iterator[tuple[str, str]]:
    """Yield the checks that a node fails, each with the problem."""
    yield from _gpu_problems(reports, gpus, limits)
    if reports[0].memory < limits.min_memory:
        memory = format_bytes(reports[0].memory)
        yield "memory", f"{memory} of memory is free, less than {format_bytes(limits.min_memory)}"
    yield from _space_problems(reports[0], limits)
    if clock is not None and abs(clock[0]) - clock[1] > limits.max_clock_offset:
        difference = f"{abs(clock[0]):.1f} s {'ahead of' if clock[0] > 0 else 'behind'} the first node's"
        yield "clock", f"its clock is {difference}, more than {limits.max_clock_offset:g} s"
    for report in reports:
        for name in sorted({*common_versions, *report.versions}):
            version, expected = report.versions.get(name, "none"), common_versions.get(name, "none")
            if version != expected:
                yield f"version of {name}", f"{name} is {version}, but {expected} on the other nodes"


def _gpu_problems(reports: Sequence[NodeReport], gpus: int, limits: Limits) -> Iterator[tuple[str, str]]:
    num_visible = min(report.gpus_seen for report in reports)
    if num_visible < gpus:
        yield "GPUs", f"{num_visible} of {gpus} GPUs are visible"
    for gpu in (gpu for report in reports for gpu in report.gpus):
        if gpu.error:
            yield "GPU", f"GPU {gpu.index}: {gpu.error}"
        elif gpu.free < limits.min_gpu_memory * gpu.total:
            free = f"{format_bytes(gpu.free)} of {format_bytes(gpu.total)} free"
            yield "GPU memory", f"GPU {gpu.index}: {free}, less than {limits.min_gpu_memory:.0%}"


def _space_problems(report: NodeReport, limits: Limits) -> Iterator[tuple[str, str]]:
    minimum = {"run": limits.min_disk, "temporary": limits.min_tmp, "shared memory": limits.min_shm}
    for use, space in report.spaces.items():
        check = RUN_FOLDER if use == "run" else use
        if space.free is None:
            yield check, f"there is no folder {space.path}"
        elif space.free < minimum[use]:
            yield check, f"{format_bytes(space.free)} free in {space.path}, less than {format_bytes(minimum[use])}"


def _common_versions(reporting: Mapping[str, Sequence[NodeReport]]) -> dict[str, str]:
    """Return the most common version of each component. Among equally common versions, the first node's wins."""
    reports = [report for node_reports in reporting.values() for report in node_reports]
    names = {name for report in reports for name in report.versions}
    counts = {name: Counter(report.versions.get(name, "none") for report in reports) for name in names}
    return {name: count.most_common(1)[0][0] for name, count in counts.items()}


def format_bytes(size: float) -> str:
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
    def from_links(links: Iterable[Link], limits: Limits) -> Links:
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
        minimum = max(self.limits.min_bandwidth, self.limits.min_bandwidth_fraction * median(others) if others else 0)
        if link.bandwidth < minimum:
            return f"{link.bandwidth:.3g} GB/s, less than {minimum:.3g}"
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


def pairs_to_repeat(first: Links) -> list[Pair]:
    """Return the pairs to measure after the ring; empty if no pair has a problem.

    All suspect pairs are measured again. In addition, a node without a good pair is measured with a good node, if there
    is a good node with which it does not form a suspect pair.
    """
    suspects, good = first.suspects(), first.good_nodes()
    isolated = [node for node in dict.fromkeys(node for pair in suspects for node in pair) if node not in good]
    new_pairs = []
    for i, node in enumerate(isolated):
        candidates = [other for other in good if not any({node, other} == set(pair) for pair in suspects)]
        if candidates:
            new_pairs.append((candidates[i % len(candidates)], node))
    return [*new_pairs, *suspects]


def judge_links(first: Links, repeated: Links) -> Verdict:
    """Judge nodes by the measurements of their pairs.

    A node is bad if it has no good pair in either measurement. If an all-reduce fails between two nodes that both have
    good pairs with other nodes, the second node is bad, because the job can run without it. If no pair is good, no node
    can be blamed, and a failed pair is a trouble. A pair that is only slow causes a warning unless one of its nodes is
    bad.

    Args:
        first: pairs of the ring.
        repeated: pairs of `pairs_to_repeat`, and the good pairs of the ring for comparison.
    """
    verdict = Verdict()
    good = {*first.good_nodes(), *repeated.good_nodes()}
    for pair in dict.fromkeys([*first.suspects(), *repeated.suspects()]):
        problem = repeated.problem(pair) if pair in repeated.slowest else first.problem(pair)
        isolated = [node for node in pair if node not in good]
        message = f"{pair[0]} and {pair[1]}: {problem}"
        if not problem:
            verdict.warnings.append(f"{pair[0]} and {pair[1]}: {first.problem(pair)} at first, normal when repeated")
        elif good and isolated:
            for node in isolated:
                verdict.bad.setdefault(node, f"with {pair[pair[0] == node]}: {problem}")
        elif not repeated.failed(pair):
            verdict.warnings.append(message)
        elif good:
            verdict.bad.setdefault(pair[1], f"with {pair[0]}, although both reach other nodes: {problem}")
        else:
            verdict.troubles.append(f"{message}; the faulty node cannot be determined")
    return verdict
