"""Selection of bad nodes from fabricated reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.launch.preflight.checks import Gpu, NodeReport, Space
from megatron_ext.launch.preflight.judge import Links, Verdict, format_bytes, judge_links, judge_nodes, pairs_to_repeat
from megatron_ext.launch.preflight.limits import Limits
from megatron_ext.launch.preflight.links import Link, Pair, ring_pairs

LIMITS = Limits()
GPU = Gpu(index=0, name="H200", free=140 * 10**9, total=141 * 10**9)
WELL = NodeReport(
    rank=0,
    local_rank=0,
    node="n1",
    processes=1,
    gpus_asked=1,
    gpus_seen=1,
    gpus=[GPU],
    memory=10**12,
    spaces={
        "run": Space(path="/runs", free=10**13),
        "temporary": Space(path="/tmp", free=10**11),
        "shared memory": Space(path="/dev/shm", free=10**10),
    },
    versions={"code": "abc", "torch": "2.13"},
)


def cluster(**changes: NodeReport) -> list[NodeReport]:
    """Reports of three nodes, with replacements by node name."""
    plain = {f"n{i + 1}": replace(WELL, node=f"n{i + 1}", rank=i) for i in range(3)}
    return list((plain | changes).values())


def verdict(reports: list[NodeReport], nodes: str = "n1 n2 n3", processes: int = 1, **clocks: float) -> Verdict:
    ahead = {node: (seconds, 0.001) for node, seconds in clocks.items()}
    return judge_nodes(nodes.split(), processes, reports, ahead, LIMITS)


def second(**fields: object) -> NodeReport:
    return replace(WELL, node="n2", rank=1, **fields)  # type: ignore[arg-type]


def space(use: str, path: str, free: int | None) -> dict[str, Space]:
    return WELL.spaces | {use: Space(path=path, free=free)}


def test_healthy_nodes_pass() -> None:
    assert verdict(cluster(), n2=0.5, n3=-1.9) == Verdict()
    assert verdict(cluster()).passed


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (second(gpus_seen=0, gpus=[]), "0 of 1 GPUs are visible"),
        (second(gpus=[replace(GPU, index=3, error="uncorrectable ECC error")]), "GPU 3: uncorrectable ECC error"),
        (second(gpus=[replace(GPU, free=10**11)]), "GPU 0: 100 GB of 141 GB free, less than 90%"),
        (second(memory=10**8), "100 MB of memory is free, less than 500 MB"),
        (second(spaces=space("temporary", "/data", 10**8)), "100 MB free in /data, less than 250 MB"),
        (second(spaces=space("shared memory", "/dev/shm", 0)), "0 MB free in /dev/shm, less than 32 MB"),
        (second(spaces=space("run", "/runs", None)), "there is no folder /runs"),
        (second(versions={"code": "abd", "torch": "2.13"}), "code is abd, but abc on the other nodes"),
        (second(versions={"code": "abc"}), "torch is none, but 2.13 on the other nodes"),
    ],
)
def test_one_node_fails_a_check(report: NodeReport, reason: str) -> None:
    assert verdict(cluster(n2=report)) == Verdict(bad={"n2": reason})


def test_a_node_that_fails_two_checks() -> None:
    found = verdict(cluster(n2=second(memory=0, gpus_seen=0, gpus=[])))
    assert found.bad == {"n2": "0 of 1 GPUs are visible, 0 MB of memory is free, less than 500 MB"}


def test_clocks() -> None:
    assert verdict(cluster(), n2=3.0, n3=-2.5).bad == {
        "n2": "its clock is 3.0 s ahead of the first node's, more than 2 s",
        "n3": "its clock is 2.5 s behind the first node's, more than 2 s",
    }
    # The travel time of the message may explain the whole offset.
    assert judge_nodes(["n1", "n2", "n3"], 1, cluster(), {"n2": (3.0, 1.5)}, LIMITS).passed


def test_fault_of_all_nodes_is_a_refusal() -> None:
    full = [replace(one, spaces=space("run", "/runs", 0)) for one in cluster()]
    assert verdict(full) == Verdict(refusals=["0 MB free in /runs, less than 1 GB on every node"])
    alone = replace(WELL, spaces=space("run", "/runs", 0))
    assert verdict([alone], "n1") == Verdict(refusals=["0 MB free in /runs, less than 1 GB"])
    # A silent node may or may not have the same fault.
    assert verdict([replace(WELL, memory=0)], "n1 n2").bad == {
        "n1": "0 MB of memory is free, less than 500 MB",
        "n2": "sent no report within 300 s",
    }
    # A fault of the only node is not common to all nodes: the next start may get another node.
    assert verdict([replace(WELL, memory=0)], "n1").bad == {"n1": "0 MB of memory is free, less than 500 MB"}


def test_expected_gpus_without_a_request() -> None:
    reports = [replace(one, gpus_asked=0) for one in cluster()]
    reports[1] = replace(reports[1], gpus_seen=0, gpus=[])
    assert verdict(reports).bad == {"n2": "0 of 1 GPUs are visible"}
    assert verdict([replace(one, gpus_seen=0, gpus=[], gpus_asked=0) for one in cluster()]).passed


def test_first_nodes_version_wins_a_tie() -> None:
    reports = [WELL, second(versions={"code": "abd", "torch": "2.13"})]
    assert verdict(reports, "n1 n2").bad == {"n2": "code is abd, but abc on the other nodes"}


def test_missing_reports() -> None:
    reason = "sent no report within 300 s"
    assert verdict(cluster()[:2]).bad == {"n3": reason}
    assert verdict(cluster()[:1], "n1 n2").bad == {"n2": reason}
    assert verdict(cluster()[:1]).bad == {"n1": "no other node reached it within 300 s"}
    assert verdict([WELL, replace(WELL, rank=1, local_rank=1), second()], "n1 n2", 2).bad == {
        "n2": f"1 of its 2 processes {reason}"
    }


def links(speeds: dict[str, float], limits: Limits = LIMITS) -> Links:
    """Links from speeds in GB/s by pair, such as `n1-n2`. Speed 0 means that the link fails."""
    return Links.from_links(
        [
            Link(pair=pair_of(key), local_rank=0, bandwidth=speed, error="" if speed else "dead")
            for key, speed in speeds.items()
        ],
        limits,
    )


def pair_of(key: str) -> Pair:
    a, b = key.split("-")
    return a, b


RING_3 = {"n1-n2": 0.0, "n3-n1": 10.0, "n2-n3": 0.0}
RING_4 = {"n1-n2": 10.0, "n3-n4": 0.0, "n2-n3": 10.0, "n4-n1": 0.0}


def judge_pairs(first: dict[str, float], again: dict[str, float], limits: Limits = LIMITS) -> Verdict:
    """Return the verdict. The pairs in `again` must be those that `pairs_to_repeat` selects."""
    before = links(first, limits)
    assert {pair_of(key) for key in again} == set(pairs_to_repeat(before))
    good = {key: speed for key, speed in first.items() if not before.problem(pair_of(key))}
    return judge_links(before, links(good | again, limits))


def test_good_links() -> None:
    assert pairs_to_repeat(links({"n1-n2": 10.0, "n3-n1": 6.0, "n2-n3": 9.0})) == []
    assert ring_pairs(["n1"]) == []
    assert ring_pairs(["n1", "n2"]) == [("n1", "n2")]
    assert len(ring_pairs(["n1", "n2", "n3"])) == 3


def test_node_that_reaches_no_neighbour_is_bad() -> None:
    found = judge_pairs(RING_3, {"n1-n2": 0.0, "n2-n3": 0.0})
    assert found == Verdict(bad={"n2": "with n1: no all-reduce (dead)"})


def test_node_slow_with_both_neighbours_is_bad() -> None:
    slow = {"n1-n2": 1.0, "n3-n1": 10.0, "n2-n3": 1.5}
    assert judge_pairs(slow, {"n1-n2": 1.0, "n2-n3": 1.5}).bad == {"n2": "with n1: 1 GB/s, less than 2.88"}


def test_measurement_with_another_node() -> None:
    assert judge_pairs(RING_4, {"n2-n4": 0.0, "n3-n4": 0.0, "n4-n1": 0.0}).bad == {
        "n4": "with n3: no all-reduce (dead)"
    }
    transient = judge_pairs(RING_4, {"n2-n4": 10.0, "n3-n4": 9.0, "n4-n1": 10.0})
    assert transient == Verdict(
        warnings=[f"{pair}: no all-reduce (dead) at first, normal when repeated" for pair in ("n3 and n4", "n4 and n1")]
    )


def test_failed_link_between_two_good_nodes() -> None:
    first = {"n1-n2": 10.0, "n3-n4": 10.0, "n2-n3": 0.0, "n4-n1": 10.0}
    reason = "with n2, although both reach other nodes: no all-reduce (dead)"
    assert judge_pairs(first, {"n2-n3": 0.0}) == Verdict(bad={"n3": reason})
    first["n2-n3"] = 1.0
    assert judge_pairs(first, {"n2-n3": 1.0}) == Verdict(warnings=["n2 and n3: 1 GB/s, less than 5"])


def test_neither_of_two_nodes_is_blamed() -> None:
    problem = "n1 and n2: no all-reduce (dead); the faulty node cannot be determined"
    assert judge_pairs({"n1-n2": 0.0}, {"n1-n2": 0.0}) == Verdict(troubles=[problem])
    assert judge_pairs({"n1-n2": 1.0}, {"n1-n2": 1.0}, Limits(min_bandwidth=2.0)) == Verdict(
        warnings=["n1 and n2: 1 GB/s, less than 2"]
    )


def test_no_node_is_blamed_without_a_good_pair() -> None:
    dead = dict.fromkeys(RING_3, 0.0)
    found = judge_pairs(dead, dead)
    assert found.bad == {}
    assert len(found.troubles) == 3


def test_a_pair_is_as_slow_as_its_slowest_link() -> None:
    both = [Link(pair=("n1", "n2"), local_rank=rank, bandwidth=speed) for rank, speed in enumerate([10.0, 2.0, 9.0])]
    assert Links.from_links(both, LIMITS).slowest["n1", "n2"].local_rank == 1


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 MB"), (4194304, "4.19 MB"), (10**9, "1 GB"), (2.5e13, "25 TB"), (1.4e11, "140 GB")]
)
def test_amounts(size: float, text: str) -> None:
    assert format_bytes(size) == text
