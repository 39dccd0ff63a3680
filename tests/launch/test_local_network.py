"""Network sockets: ranks of a local run and their launcher listen only on the loopback interface."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from megatron_ext.launch.local import launch, rendezvous_store

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, sys
sys.path[:0] = [{root!r}, {tests!r}]
import torch.distributed as dist
from datetime import timedelta
from test_local_network import listening
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
dist.barrier()
found = {{"rank": listening(os.getpid()), "launcher": listening(os.getppid())}}
open({folder!r} + f"/{{dist.get_rank()}}.json", "w").write(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def listening(pid: int) -> list[str]:
    """Addresses on which a process listens, in the kernel's notation: 0100007F is 127.0.0.1."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor))
        except OSError:
            continue  # closed in the meantime
    rows = [
        row.split()
        for table in ("tcp", "tcp6")
        if Path(f"/proc/{pid}/net/{table}").exists()
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


LOOPBACK = {"0100007F", "00000000000000000000000001000000"}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux who listens")


def test_the_store() -> None:
    before = listening(os.getpid())
    store = rendezvous_store()
    opened = listening(os.getpid())
    for address in before:
        opened.remove(address)
    assert opened == ["0100007F"]
    store.set("key", "value")
    assert store.get("key") == b"value"
    del store
    assert listening(os.getpid()) == before


@pytest.mark.slow
def test_ranks_and_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # set by a cluster's profile, must be ignored here
    program = tmp_path / "rank.py"
    program.write_text(RANK.format(root=str(ROOT), tests=str(Path(__file__).parent), folder=str(tmp_path)))
    assert launch([sys.executable, str(program)], 2) == 0
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found["launcher"]) == {"0100007F"}
        assert found["rank"], "gloo listens"
        assert set(found["rank"]) <= LOOPBACK
