"""A real Slurm on this machine, for tests: a controller, and nodes that are hosts of their own.

    with Mini("h100:2:8 a100:1:4") as slurm:          # two nodes of 8 fake GPUs, one of 4
        job = slurm.submit(path)
        assert slurm.wait(job, 60) == ["COMPLETED"], slurm.output(job)

All of it, the jobs too, runs in namespaces of its own: processes, mounts and a network in which each node is one more
namespace on a bridge. So it needs no free port or address, changes nothing outside, and ends to the last process when
the first one does, which lives no longer than the process that made it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "ip")
NETWORK = "10.213.77"
CONTROLLER = "control"
NODE_CPUS, NODE_MB = 128, 2_000_000
START_SECONDS = 30
GRACE_SECONDS = 120  # that a preempted job has left; it may end earlier
# How soon a requeued job may start again is, oddly, the lifetime of a job credential. The scheduler looks every second
# rather than every half minute, but only once something has happened: nodes report every third of SlurmdTimeout.
# Requests that no nodes could meet are refused at once.
CONFIGURATION = """
ClusterName=mini
SlurmctldHost={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge,cred_expire=10
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/slurmd-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,bf_hetjob_immediate,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
GresTypes=gpu
EnforcePartLimits=ALL
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
KillWait=5
SlurmdTimeout=30
MinJobAge=3600
"""
INSTALL_SECONDS = 300
# This Python for jobs, and Slurm's daemons, which are not on everybody's path.
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
# The first process of the namespaces: it takes in orphans, and ends when its input does; then so do all others.
INIT = """
import os, shutil, sys, threading, time
def end():
    sys.stdin.read()
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    os._exit(0)
threading.Thread(target=end, daemon=True).start()
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.1)
"""


class Unavailable(Exception):
    """This machine cannot run it, and why."""


@dataclass(frozen=True)
class Kind:
    """Nodes alike: partition, feature and GPU type are all called ``name``. Without GPUs they are CPU nodes."""

    name: str
    count: int
    gpus: int


def kinds(layout: str) -> list[Kind]:
    """``h100:2:8 a100:1:4``: type, nodes, GPUs per node. A type may come again, with another number of GPUs."""
    found = [re.fullmatch(r"([\w.-]+):(\d+):(\d+)", word) for word in layout.split()]
    assert found, "a layout without nodes"
    assert all(found), f"a layout is type:nodes:gpus ..., got {layout!r}"
    return [Kind(match[1], int(match[2]), int(match[3])) for match in found if match]


def install() -> None:
    """Install what is missing. Raises Unavailable, with the reason."""
    if os.geteuid() != 0:
        raise Unavailable("a mini Slurm needs root: slurmd starts jobs as the user who submits them")
    missing = [program for program in PROGRAMS if not shutil.which(program, path=PATH)]
    if not missing:
        return
    if not shutil.which("apt-get", path=PATH):
        raise Unavailable(f"{', '.join(missing)} are not installed, and there is no apt-get")
    # Without it the packages would start daemons of their own.
    policy = Path("/usr/sbin/policy-rc.d")
    own = not policy.exists()
    if own:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
            done = subprocess.run(
                ["apt-get", "--quiet", *command],
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=INSTALL_SECONDS,
            )
            if done.returncode:
                last = (done.stderr or done.stdout).strip().splitlines()[-1:]
                raise Unavailable(f"apt-get {command[0]} failed: {' '.join(last)}")
    except subprocess.TimeoutExpired:
        raise Unavailable(f"apt-get took more than {INSTALL_SECONDS} s") from None
    finally:
        if own:
            policy.unlink()


class Mini:
    """A mini Slurm, from construction until `stop`.

    Args:
        layout: as `kinds` takes it. Partitions are the types, ``all``, and ``scav``, whose jobs the others preempt.
        running: False: only the controller runs, and takes the nodes to be asleep. It judges ``sbatch --test-only``, of
            any number of nodes, and starts no job.

    Raises:
        Unavailable: this machine cannot run it.
    """

    def __init__(self, layout: str, *, running: bool = True) -> None:
        install()
        self.kinds = kinds(layout)
        self.running = running
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="mini-slurm-"))
        self.folder.chmod(0o755)
        self._init = subprocess.Popen(
            ["unshare", "--pid", "--net", "--mount", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc",
             sys.executable, "-I", "-c", INIT, str(self.folder)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert self._init.stdout is not None
            assert self._init.stderr is not None
            if self._init.stdout.readline() != "up\n":
                raise Unavailable(f"no namespaces here: {self._init.stderr.read().strip()}")
            children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children").read_text().split()
            self._enter = ["nsenter", f"--target={children[0]}", "--pid", "--net", "--mount", "--uts", "--ipc", "--"]
            self._start()
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Mini:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every process of it and remove its folder."""
        assert self._init.stdin is not None
        self._init.stdin.close()
        for process in (self._init, *self._daemons):
            process.wait(20)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- jobs

    def call(
        self,
        *command: str,
        cwd: Path | str = "/",
        env: Mapping[str, str] | None = None,
        node: str | None = None,
        check: bool = True,
        seconds: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command beside the controller, or on a node."""
        where = ["nsenter", f"--net=/run/netns/{node}"] if node else []
        done = subprocess.run(
            [*self._enter, *where, "env", f"--chdir={cwd}", *command],
            env={**self._environment, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
        )
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.stderr or done.stdout}{self._logs()}"
        return done

    def submit(self, script: Path | str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None) -> int:
        """Submit a script, options of sbatch before it and its own arguments after ``--``; the job's number."""
        options = arguments[: arguments.index("--")] if "--" in arguments else arguments
        done = self.call(
            "sbatch", "--parsable", *options, str(script), *arguments[len(options) + 1 :], cwd=cwd, env=env
        )
        return int(done.stdout.split(";")[0])

    def refusal(self, script: Path | str, *options: str, cwd: Path | str = "/") -> str | None:
        """Why Slurm would not take a script; None: it would."""
        done = self.call("sbatch", "--test-only", *options, str(script), cwd=cwd, check=False)
        return done.stderr if done.returncode else None

    def waiting(self, job: int) -> bool:
        """Whether a job has not ended, whatever its state."""
        return bool(self.call("squeue", "--noheader", f"--jobs={job}", check=False).stdout.strip())

    def wait(self, job: int, seconds: float) -> list[str]:
        """Wait for a job to end: the states of its components or array tasks."""
        deadline = time.monotonic() + seconds
        while self.waiting(job):  # sbatch --wait would look only twice a minute
            assert time.monotonic() < deadline, f"job {job} has not ended in {seconds} s\n{self.show(job)}"
            time.sleep(0.3)
        return self.states(job)

    def processes(self, job: int) -> dict[int, int]:
        """A job's ranks: the number each has on this machine, outside the namespaces."""
        found, own = {}, os.readlink(f"/proc/{self._enter[1].partition('=')[2]}/ns/pid")
        for folder in Path("/proc").iterdir():
            try:
                if not folder.name.isdecimal() or os.readlink(folder / "ns" / "pid") != own:
                    continue
                items = (folder / "environ").read_text(errors="replace").split("\0")
            except OSError:  # it has ended, or never had any
                continue
            environment = dict(item.split("=", 1) for item in items if "=" in item)
            if environment.get("SLURM_JOB_ID") == str(job) and "RANK" in environment:
                found[int(environment["RANK"])] = int(folder.name)
        return found

    def states(self, job: int) -> list[str]:
        return re.findall(r"JobState=(\w+)", self.show(job))

    def show(self, job: int) -> str:
        return self.call("scontrol", "show", "job", str(job)).stdout

    # --- setting up

    @property
    def _environment(self) -> dict[str, str]:
        hidden = ("SLURM", "SBATCH", "COVERAGE", "PYTEST")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        return {**kept, "PATH": PATH, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _start(self) -> None:
        for name in ("state", "spool", "log", "gpus"):
            (self.folder / name).mkdir()
        addresses = self._configure()
        self._make_hosts(addresses if self.running else {})
        where = f"--key-file={self.folder}/key", f"--pid-file={self.folder}/munged.pid"
        files = f"--seed-file={self.folder}/seed", f"--log-file={self.folder}/log/munged"
        self._spawn("munged", "--foreground", f"--socket={self.folder}/munge", *where, *files)
        self._await(lambda: (self.folder / "munge").exists(), "the socket of munged")
        self._spawn("slurmctld", "-D", "-c")
        for name in addresses if self.running else ():
            start = 'hostname "$0"; exec slurmd -D -N "$0"'
            (self.folder / "spool" / name).mkdir()
            # Not ip netns exec, which hides what is mounted below /sys.
            self._spawn("nsenter", f"--net=/run/netns/{name}", "unshare", "--uts", "sh", "-c", start, name)
        self._await(lambda: self._idle() == set(addresses), f"nodes {', '.join(addresses)}")

    def _configure(self) -> dict[str, str]:
        """Write the configuration; the nodes' addresses by name."""
        folder = self.folder
        names: dict[str, list[str]] = {}
        lines, gres = [], []
        for kind in self.kinds:
            before = names.setdefault(kind.name, [])
            new = [f"{kind.name}-{len(before) + i + 1}" for i in range(kind.count)]
            before += new
            what = f"CPUs={NODE_CPUS} RealMemory={NODE_MB} Feature={kind.name}"
            if kind.gpus:
                what += f" Gres=gpu:{kind.name}:{kind.gpus}"
                files = f"{folder}/gpus/{kind.name}[0-{kind.gpus - 1}]"
                gres.append(f"NodeName={','.join(new)} Name=gpu Type={kind.name} File={files}")
                for i in range(kind.gpus):  # any device file will do, and makes Slurm set CUDA_VISIBLE_DEVICES
                    if not (file := folder / "gpus" / f"{kind.name}{i}").exists():
                        file.symlink_to("/dev/null")
            lines.append(f"NodeName={','.join(new)} {what} State={'UNKNOWN' if self.running else 'CLOUD'}")
        nodes = [name for group in names.values() for name in group]
        partition = "MaxTime=7-00:00:00 DefaultTime=10"
        for i, (name, group) in enumerate(names.items()):
            default = "YES" if i == 0 else "NO"
            lines.append(f"PartitionName={name} Nodes={','.join(group)} Default={default} PriorityTier=10 {partition}")
        lines.append(f"PartitionName=all Nodes={','.join(nodes)} PriorityTier=10 {partition}")
        lines.append(
            f"PartitionName=scav Nodes={','.join(nodes)} PriorityTier=1 PreemptMode=REQUEUE "
            f"GraceTime={GRACE_SECONDS} {partition}"
        )
        asleep = (
            ""
            if self.running
            else "PrivateData=cloud\nSuspendProgram=/bin/true\nResumeProgram=/bin/true\nSuspendTime=3600\n"
        )
        text = CONFIGURATION.format(controller=CONTROLLER, folder=folder) + asleep + "\n".join(lines) + "\n"
        (folder / "slurm.conf").write_text(text)
        (folder / "gres.conf").write_text("\n".join(gres) + "\n")
        if int(self.call("slurmctld", "-V").stdout.split()[1].split(".")[0]) >= 24:  # earlier ones do without it
            (folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n")
        key = folder / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        return {name: f"{NETWORK}.{i + 2}" for i, name in enumerate(nodes)}

    def _make_hosts(self, addresses: Mapping[str, str]) -> None:
        """The network: a namespace per node, on one bridge, which is the controller's way to them."""
        hosts = {"localhost": "127.0.0.1", CONTROLLER: f"{NETWORK}.1" if addresses else "127.0.0.1", **addresses}
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in hosts.items()))
        # There is no name server here, and waiting for one takes long.
        (self.folder / "nsswitch").write_text("passwd: files\ngroup: files\nhosts: files\n")
        script = [
            f"hostname {CONTROLLER}",
            f"mount --bind {self.folder}/hosts /etc/hosts",
            f"mount --bind {self.folder}/nsswitch /etc/nsswitch.conf",
            "mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns",
            "ip link set lo up",
            "ip link add bridge type bridge && ip link set bridge up",
            f"ip address add {NETWORK}.1/24 dev bridge",
        ]
        for i, (name, address) in enumerate(addresses.items()):
            script += [
                f"ip netns add {name}",
                f"ip link add port{i} type veth peer name eth0 netns {name}",
                f"ip link set port{i} master bridge up",
                f"ip -n {name} address add {address}/24 dev eth0",
                f"ip -n {name} link set eth0 up && ip -n {name} link set lo up",
            ]
        done = self.call("sh", "-e", "-c", "\n".join(script), check=False)
        if done.returncode:
            raise Unavailable(f"no hosts in network namespaces here: {done.stderr.strip()}")

    def _spawn(self, *command: str) -> None:
        log = self.folder / "log" / f"start-{len(self._daemons)}"
        with log.open("w") as file:
            self._daemons.append(
                subprocess.Popen(
                    [*self._enter, *command],
                    env=self._environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            )

    def _await(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not ready():
            ended = [process.args for process in self._daemons if process.poll() is not None]
            assert not ended, f"mini Slurm: {ended} has ended{self._logs()}"
            assert time.monotonic() < deadline, f"mini Slurm: no {what} within {START_SECONDS} s{self._logs()}"
            time.sleep(0.1)

    def _idle(self) -> set[str]:
        done = self.call("sinfo", "--noheader", "--Node", "--partition=all", "--format=%N %t", check=False)
        return {name for name, state in map(str.split, done.stdout.splitlines()) if state in ("idle", "idle~")}

    def _logs(self) -> str:
        logs = sorted((self.folder / "log").glob("*"))
        return "".join(f"\n--- {log.name}\n" + log.read_text(errors="replace")[-800:] for log in logs)
