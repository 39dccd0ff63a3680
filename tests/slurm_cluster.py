"""A real Slurm of virtual nodes on this machine, for tests: a tree of Linux namespaces that ends with its process.

The outer one is the login host, with munged, slurmctld and a bridge without a link to the outside; each inner one is a
node with its own address, host name and processes. Nothing outside its folder changes. It needs root.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from required import unless_required

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter")
NAMESPACES = ("--uts", "--mount", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc")
PATH = f"/usr/sbin:/usr/bin:/sbin:/bin:{os.environ['PATH']}"
LOGIN = "10.77.0.254"
STARTUP = 60
"""Seconds until all nodes are there: one is enough where a machine has nothing else to do."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost=login({login})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={slurmd_timeout}
MessageTimeout=5
SrunPortRange=61000-65000
KillWait={kill_wait}
NodeName=n[1-{nodes}] CPUs={cpus} RealMemory=64000 {node}
PartitionName=main Nodes=ALL Default=YES MaxTime={max_time} State=UP
"""

DECLARED = """
GresTypes=gpu
EnforcePartLimits=ALL
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
PrivateData=cloud
"""
"""Nodes that nobody starts: Slurm takes them for ones that it could wake, and shows them."""

PREEMPTING = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""
"""A second partition, whose jobs drive those of the first one from their nodes."""


def missing() -> str:
    """Why no cluster can be made here; empty if one can.

    Raises:
        RuntimeError: none can, and SELECTRON_REQUIRED names `slurm`.
    """
    return unless_required("slurm", _missing())


def _missing() -> str:
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"Slurm is not installed (no {', '.join(absent)}); tools/install_slurm.sh installs it"
    if os.geteuid() != 0:
        return "virtual Slurm nodes need root"
    command = ["unshare", "--net", *NAMESPACES, "true"]
    tried = subprocess.run(command, env={**os.environ, "PATH": PATH}, capture_output=True, text=True, check=False)
    return f"no Linux namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


class SlurmCluster:
    """A started cluster; `stop` ends it, and so does the end of this process.

    Args:
        folder: for configuration, logs and state.
        nodes: number of nodes, called n1, n2, ...
        cpus: that each says it has.
        declared_gpus: GPUs that each is said to have, where none is to be started: for what is refused or accepted
            before it runs. None: nodes are started, and have none.
        max_time: limit of the partition.
        is_preempting: whether there is a second partition, `urgent`, to whose jobs others give way.
        slurmd_timeout: seconds after which a node that does not answer is taken for down.
        kill_wait: seconds from SIGTERM to SIGKILL, for a job whose time is up or that is cancelled.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int,
        cpus: int,
        *,
        declared_gpus: int | None = None,
        max_time: str = "INFINITE",
        is_preempting: bool = False,
        slurmd_timeout: int = 8,
        kill_wait: int = 2,
    ) -> None:
        self.folder = folder
        for name in ("state", *(f"spool/n{node + 1}" for node in range(nodes))):
            (folder / name).mkdir(parents=True)
        node, more = "State=UNKNOWN", ""
        if declared_gpus is not None:
            node, more = f"Gres=gpu:{declared_gpus} State=CLOUD NodeAddr=127.0.0.1 Port=[7000-{6999 + nodes}]", DECLARED
        values = {"login": LOGIN, "folder": folder, "nodes": nodes, "cpus": cpus, "node": node, "max_time": max_time}
        values |= {"slurmd_timeout": slurmd_timeout, "kill_wait": kill_wait}
        urgent = PREEMPTING if is_preempting else ""
        (folder / "slurm.conf").write_text(more + CONFIGURATION.format(**values) + urgent)
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        addresses = [f"10.77.0.{node + 1} n{node + 1}" for node in range(nodes)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{LOGIN} login", *addresses, ""]))
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(1024))
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        command = [
            "unshare",
            "--net",
            *NAMESPACES,
            sys.executable,
            __file__,
            str(folder),
            str(0 if declared_gpus is not None else nodes),
        ]
        with (folder / "login.log").open("wb") as log:
            self.holder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        self._wait_for_nodes(nodes, "idle" if declared_gpus is None else "all")

    def _wait_for_nodes(self, nodes: int, states: str) -> None:
        end = time.monotonic() + STARTUP
        while time.monotonic() < end:
            time.sleep(0.1)
            if (self.folder / "ready").exists() and len(self.nodes_in(states)) == nodes:
                return
        self.stop()
        raise TimeoutError(f"Slurm has not started in {STARTUP} s; see {self.folder}")

    def nodes_in(self, states: str) -> set[str]:
        """Names of the nodes that are in one of the states (of `sinfo --states`) and answer."""
        # A node is listed once for each of its partitions.
        listed = ("sinfo", "--noheader", "--Node", "--responding", f"--states={states}", "--format=%N")
        return set(self.run(*listed, check=False).split())

    def run(self, *command: str, check: bool = True) -> str:
        """What a command prints on the login host.

        Raises:
            RuntimeError: it fails.
        """
        pid = self.holder.pid
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        enter = ["nsenter", "-t", inside, "-m", "-n", "-u", "-i", "-p", f"--wdns={Path.cwd()}", "--"]
        done = subprocess.run([*enter, *command], env=self.environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def on_node(self, name: str, *command: str) -> str:
        """What a command prints on a node.

        Raises:
            RuntimeError: it fails.
        """
        outer = (self.folder / f"{name}.pid").read_text()
        inside = self.run("cat", f"/proc/{outer}/task/{outer}/children").split()[0]
        return self.run("nsenter", "-t", inside, "-m", "-n", "-u", "-i", "-p", "--", *command)

    def kill_node(self, name: str) -> None:
        """A power cut: the link first, so that nobody is told."""
        self.run("ip", "link", "del", f"v{name}")
        self.run("kill", "-KILL", (self.folder / f"{name}.pid").read_text())

    def start_node(self, name: str) -> None:
        """The end of a power cut."""
        self.run(sys.executable, __file__, str(self.folder), "--node", name.removeprefix("n"))

    def cut_link(self, name: str) -> None:
        """From now on what is sent to a node, or by it, is lost, and nobody is told."""
        self.run("ip", "link", "set", f"v{name}", "nomaster")

    def mend_link(self, name: str) -> None:
        """The end of that."""
        self.run("ip", "link", "set", f"v{name}", "master", "br0")

    def restart_controller(self) -> None:
        """End slurmctld as by a crash, and start it again with what it had saved."""
        self.run("kill", "-KILL", (self.folder / "slurmctld.pid").read_text().strip())
        self.run("slurmctld")

    def stop(self) -> None:
        """End everything that runs in it."""
        self.holder.kill()
        self.holder.wait()


def serve(folder: Path, nodes: int) -> None:
    """Be the first process of the login host until standard input ends."""
    socket.sethostname("login")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    # slurmd logs the user in to learn the environment; the profile here may be slow, or leave locks when killed.
    (folder / "home").mkdir()
    (folder / "passwd").write_text(f"root:x:0:0:root:{folder}/home:/bin/sh\n")
    for name in ("hosts", "nsswitch.conf", "passwd"):
        _run("mount", "--bind", str(folder / name), f"/etc/{name}")
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "br0", "type", "bridge")
    _run("ip", "addr", "add", f"{LOGIN}/24", "dev", "br0")
    _run("ip", "link", "set", "br0", "up")
    files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
    options = [f"--{option}={folder / name}" for option, name in (files | {"log-file": "munged.log"}).items()]
    _run("munged", "--force", *options)
    _run("slurmctld", "-c")
    for node in range(nodes):
        _start_node(folder, node + 1)
    (folder / "ready").touch()
    sys.stdin.read()


def _start_node(folder: Path, number: int) -> None:
    """Start slurmd in namespaces of its own, joined to the bridge of the first process by a pair of virtual links."""
    name = f"n{number}"
    script = f"""set -e
        ip link set lo up
        ip link add eth0 type veth peer name v{name} netns 1
        ip addr add 10.77.0.{number}/24 dev eth0
        ip link set eth0 up
        nsenter -t 1 -n ip link set v{name} master br0 up
        exec unshare {" ".join(NAMESPACES)} sh -c 'hostname {name}; slurmd -N {name}; exec sleep infinity'"""
    with (folder / f"{name}.log").open("wb") as log:
        node = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    (folder / f"{name}.pid").write_text(str(node.pid))


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[2] == "--node":
        _start_node(Path(sys.argv[1]), int(sys.argv[3]))
    else:
        serve(Path(sys.argv[1]), int(sys.argv[2]))
