"""Real Slurm cluster of virtual nodes on this machine, for tests: Linux namespaces that end with their process.

The outer namespace is the login host, with munged, slurmctld and a bridge without a link to the outside. Each inner
namespace is a node with its own address, host name and processes. Nothing outside the cluster's folder changes. The
cluster needs root.
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
STARTUP = 240
"""Seconds to wait for all nodes. One is enough on an idle machine."""
FAILING = 8
"""Seconds after which a node that does not respond is considered down, in tests in which nodes fail."""

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
MessageTimeout={message_timeout}
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
"""Configuration of nodes that are never started. Slurm treats them as powered down and lists them."""

PREEMPTING = """
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=urgent Nodes=ALL PriorityTier=10 State=UP
"""
"""Configuration of a second partition, whose jobs preempt those of the first."""


def missing() -> str:
    """Return the reason why no cluster can be started here, or "" if one can.

    Raises:
        RuntimeError: no cluster can be started, and SELECTRON_REQUIRED names `slurm`.
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
    """Running cluster. It ends with `stop` or with this process.

    Args:
        folder: folder for configuration, logs and state.
        nodes: number of nodes, called n1, n2, ...
        cpus: number of CPUs that each node reports.
        declared_gpus: number of GPUs that each node declares. Nodes are then not started: Slurm only checks requests.
            None: nodes are started and have no GPUs.
        max_time: time limit of the partition.
        is_preempting: whether there is a second partition, `urgent`, whose jobs preempt others.
        slurmd_timeout: seconds after which a node that does not respond is considered down. `FAILING` if nodes are to
            fail. By default, nodes of a busy machine never count as down.
        kill_wait: seconds from SIGTERM to SIGKILL for a job that is cancelled or past its time limit.
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
        slurmd_timeout: int = 300,
        kill_wait: int = 30,
    ) -> None:
        self.folder = folder
        for name in ("state", *(f"spool/n{node + 1}" for node in range(nodes))):
            (folder / name).mkdir(parents=True)
        node, more = "State=UNKNOWN", ""
        if declared_gpus is not None:
            node, more = f"Gres=gpu:{declared_gpus} State=CLOUD NodeAddr=127.0.0.1 Port=[7000-{6999 + nodes}]", DECLARED
        values = {"login": LOGIN, "folder": folder, "nodes": nodes, "cpus": cpus, "node": node, "max_time": max_time}
        values |= {"slurmd_timeout": slurmd_timeout, "kill_wait": kill_wait}
        values["message_timeout"] = 5 if slurmd_timeout < 60 else 60  # a failed node is silent for both times
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
        """Names of responding nodes in one of the states (as for `sinfo --states`)."""
        # sinfo lists a node once per partition.
        listed = ("sinfo", "--noheader", "--Node", "--responding", f"--states={states}", "--format=%N")
        return set(self.run(*listed, check=False).split())

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command on the login host and return its output.

        Raises:
            RuntimeError: the command fails.
        """
        done = self.call(*command)
        if check and done.returncode:
            raise RuntimeError(f"{command} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command on the login host, which may fail."""
        pid = self.holder.pid
        inside = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
        enter = ["nsenter", "-t", inside, "-m", "-n", "-u", "-i", "-p", f"--wdns={Path.cwd()}", "--"]
        return subprocess.run([*enter, *command], env=self.environment, capture_output=True, text=True, check=False)

    def on_node(self, name: str, *command: str) -> str:
        """Run a command on a node and return its output.

        Raises:
            RuntimeError: the command fails.
        """
        outer = (self.folder / f"{name}.pid").read_text()
        inside = self.run("cat", f"/proc/{outer}/task/{outer}/children").split()[0]
        return self.run("nsenter", "-t", inside, "-m", "-n", "-u", "-i", "-p", "--", *command)

    def kill_node(self, name: str) -> None:
        """Simulate a power cut. Cut the link first, so that no peer is notified."""
        self.run("ip", "link", "del", f"v{name}")
        self.run("kill", "-KILL", (self.folder / f"{name}.pid").read_text())

    def start_node(self, name: str) -> None:
        """Start a node after a power cut."""
        self.run(sys.executable, __file__, str(self.folder), "--node", name.removeprefix("n"))

    def cut_link(self, name: str) -> None:
        """Cut the link of a node: packets to and from it are lost without notice."""
        self.run("ip", "link", "set", f"v{name}", "nomaster")

    def mend_link(self, name: str) -> None:
        """Restore the link of a node."""
        self.run("ip", "link", "set", f"v{name}", "master", "br0")

    def restart_controller(self, signal: str = "KILL") -> None:
        """End slurmctld by a signal, by default as in a crash, and start it again from its saved state."""
        pid = (self.folder / "slurmctld.pid").read_text().strip()
        self.run("kill", f"-{signal}", pid)
        # Nobody waits for the process: once it has ended, it has an empty command line.
        self.run("sh", "-c", f"while grep -q . /proc/{pid}/cmdline 2>/dev/null; do sleep 0.05; done")
        self.run("slurmctld")

    def stop(self) -> None:
        """End all processes of the cluster."""
        self.holder.kill()
        self.holder.wait()


def serve(folder: Path, nodes: int) -> None:
    """Run as the first process of the login host until standard input ends."""
    socket.sethostname("login")
    (folder / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
    # slurmd starts a login shell to get the environment. The real profile may be slow, or leave locks when killed.
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
    """Start slurmd in its own namespaces, connected to the bridge of the login host by a veth pair.

    The hardware address is fixed, because the other nodes remember it for half a minute.
    """
    name = f"n{number}"
    script = f"""set -e
        ip link set lo up
        ip link add eth0 address 02:00:0a:4d:00:{number:02x} type veth peer name v{name} netns 1
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
