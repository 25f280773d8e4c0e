"""Uneven machines made of one: CPU ranks with a quota of a core, and nodes that are network namespaces with slow links.

`build` makes what a plan's places ask for, before ranks start; each rank moves in with `enter`; `remove` takes it all
away. A keeper, a process of its own, does the removing: it outlives whatever happens to the process that built, so
nothing is left behind when that one crashes or is killed. Linux and root only. Sources: cgroup-v1/cpu, cgroup-v2,
`tc-tbf(8)`, `veth(4)`.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import string
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the keeper runs this file alone
    from hexiseq.cluster import Place

# Short, so that a rank that has used its share does not keep others waiting for long; 10 ms loses a tenth of a fifth.
PERIOD_US = 20_000
INTERFACE = "eth0"  # inside a namespace
_SETTLING_SECONDS = 15.0  # in which the ranks of a process that was killed end
_NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
# Of a real card's order: what a rank sends does not keep its acknowledgements of the other direction waiting for long.
_QUEUE_SECONDS = 0.02
_BURST_SECONDS = 0.002
_LEAST_BURST_BYTES = 131_072  # two of the largest segments


@dataclass(frozen=True)
class Berth:
    """Where a rank's process moves before it works.

    Attributes:
        cgroup: folder of the control group that has its quota; empty: none.
        namespace: name of its network namespace; empty: the machine's own.
        address: of the machine as the namespace sees it.
    """

    cgroup: str = ""
    namespace: str = ""
    address: str = ""


def build(places: Sequence[Place], namespaces: bool) -> tuple[Berth, ...]:
    """Make the quotas and, if asked to, the namespaces of a job; what this process built before is removed.

    Args:
        places: of each rank. Seats with a quota get a control group each.
        namespaces: every node becomes a network namespace, its link capped at the node's network bandwidth both ways.

    Returns:
        by rank.

    Raises:
        ValueError: this machine cannot, saying why and what to do. Nothing is left behind.
    """
    remove()
    quotas = [place.seat.quota for place in places]
    if not any(quotas) and not namespaces:
        return (Berth(),) * len(places)
    keeper = _Keeper()
    try:
        groups = _make_groups(keeper, quotas) if any(quotas) else [""] * len(places)
        nodes = {place.node: place.node_class.network_gb_per_s for place in places} if namespaces else {}
        names, address = _make_namespaces(keeper, nodes) if namespaces else ({}, "")
    except BaseException:
        keeper.finish()
        raise
    _keepers.append(keeper)
    return tuple(Berth(group, names.get(place.node, ""), address) for place, group in zip(places, groups, strict=True))


def remove() -> None:
    """Take away what this process built; its ranks must have ended."""
    while _keepers:
        _keepers.pop().finish()


def enter(berth: Berth) -> None:
    """Move this process to its berth: before it opens connections, since those stay where they were made."""
    if berth.cgroup:
        (Path(berth.cgroup) / "cgroup.procs").write_text(str(os.getpid()))
    if berth.namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        with (_NAMESPACES / berth.namespace).open() as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                error = ctypes.get_errno()
                raise OSError(error, f"cannot enter network namespace {berth.namespace}: {os.strerror(error)}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        os.environ["MASTER_ADDR"] = berth.address
        # No name server answers in there; looking up who called must not wait for one.
        os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


@contextlib.contextmanager
def built(places: Sequence[Place], namespaces: bool) -> Iterator[tuple[Berth, ...]]:
    """`build`, and `remove` at the end."""
    try:
        yield build(places, namespaces)
    finally:
        remove()


def lacks_quotas() -> str | None:
    """Why this machine cannot give quotas; None if it can, which is tried."""
    return _trial(lambda keeper: _make_groups(keeper, [0.5]))


def lacks_namespaces() -> str | None:
    """Why this machine cannot make namespaces with slow links; None if it can, which is tried."""
    return _trial(lambda keeper: _make_namespaces(keeper, {0: 0.1}))


def _trial(make: Any) -> str | None:
    keeper = _Keeper()
    try:
        make(keeper)
    except ValueError as error:
        return str(error)
    finally:
        keeper.finish()
    return None


# --- quotas


def _make_groups(keeper: _Keeper, quotas: Sequence[float | None]) -> list[str]:
    """A control group for each quota that is not None, by the first way that works."""
    reasons = []
    for root, unified in _roots():
        try:
            return [_make_group(keeper, root, unified, f"hexiseq-{keeper.name}-{i}", q) if q else ""
                    for i, q in enumerate(quotas)]  # fmt: skip
        except OSError as error:
            reasons.append(f"{root}: {error.strerror}")
    raise ValueError(
        "this machine gives no CPU quotas, which devices with quota: need "
        f"({'; '.join(reasons) or 'no cgroup file system with the cpu controller is mounted'}); run as root where the "
        "cpu controller of cgroups is writable, or use a cluster without quota: such as cpu_mixed"
    )


def _roots(mounts: Path = Path("/proc/mounts"), own: Path = Path("/proc/self/cgroup")) -> list[tuple[Path, bool]]:
    """Groups below which one for a rank may be made, and whether they are of cgroup v2: this process's own first."""
    if not mounts.exists() or not own.exists():
        return []
    within = {}  # controllers (none: v2) -> this process's group
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        within[frozenset(controllers.split(",")) if controllers else None] = path
    found: list[tuple[Path, bool]] = []
    for line in mounts.read_text().splitlines():
        _, mount, kind, options = line.split()[:4]
        if kind == "cgroup" and "cpu" in options.split(","):
            path = next((path for names, path in within.items() if names and "cpu" in names), "/")
            group = Path(mount) / path.lstrip("/")
            found += [(g, False) for g in dict.fromkeys((group, Path(mount))) if g.is_dir()]
        elif kind == "cgroup2":
            group = Path(mount) / within.get(None, "/").lstrip("/")
            while not group.is_dir():  # as outside a container sees it
                group = group.parent
            above = [group, *group.parents]
            groups = above[: above.index(Path(mount)) + 1] if Path(mount) in above else [Path(mount)]
            # A group with processes cannot pass its controllers on: one further up can.
            for g in groups:
                offered = g / "cgroup.controllers"
                if offered.exists() and "cpu" in offered.read_text().split():
                    found.append((g, True))
    return found


def _make_group(keeper: _Keeper, root: Path, unified: bool, name: str, quota: float) -> str:
    if unified and "cpu" not in (root / "cgroup.subtree_control").read_text().split():
        (root / "cgroup.subtree_control").write_text("+cpu")
    group = root / name
    keeper.watch("cgroup", str(group))
    group.mkdir()
    if unified:
        (group / "cpu.max").write_text(f"{round(quota * PERIOD_US)} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(round(quota * PERIOD_US)))
    return str(group)


# --- slow links


def _make_namespaces(keeper: _Keeper, nodes: dict[int, float]) -> tuple[dict[int, str], str]:
    """A namespace for each node, on one bridge, its link capped at so many GB/s both ways.

    Returns:
        the namespaces' names by node, and the bridge's address.
    """
    _check_launcher()
    bridge = f"hx{keeper.name}"
    names = {node: f"hexiseq-{keeper.name}-{i}" for i, node in enumerate(nodes)}
    try:
        network = _free_network()
        keeper.watch("link", bridge)
        _ip("link", "add", bridge, "type", "bridge")
        _ip("addr", "add", f"{network}.1/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for i, (node, gb_per_s) in enumerate(nodes.items()):
            name, outside = names[node], f"{bridge}v{i}"
            keeper.watch("namespace", name)
            _ip("netns", "add", name)
            keeper.watch("link", outside)
            _ip("link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _ip("link", "set", outside, "master", bridge, "up")
            _ip("-n", name, "addr", "add", f"{network}.{i + 2}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            burst = max(_LEAST_BURST_BYTES, round(gb_per_s * 1e9 * _BURST_SECONDS))
            cap = ("root", "tbf", "rate", f"{round(gb_per_s * 8e9)}bit", "burst", str(burst),
                   "limit", str(2 * burst + round(gb_per_s * 1e9 * _QUEUE_SECONDS)))  # fmt: skip
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, *cap)  # what the node sends
            _run("tc", "qdisc", "add", "dev", outside, *cap)  # what it receives
    except (OSError, subprocess.CalledProcessError) as error:
        why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise ValueError(
            f"this machine makes no network namespaces with slow links, which a cluster with namespaces: true needs "
            f"({why}); run as root with iproute2 installed where the kernel has veth, bridge and tbf, or set "
            "cluster.namespaces=false to run over the machine's own network"
        ) from error
    return names, f"{network}.1"


def _check_launcher() -> None:
    """A store inside a rank would be in that rank's namespace, out of the others' reach."""
    ranks, here = (os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks is not None and (ranks != here or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"):
        raise ValueError(
            f"a cluster with namespaces: true is made on one machine, whose {here or 'unknown number of'} of {ranks} "
            "ranks must be started by python train.py or torchrun"
        )


def _free_network() -> str:
    taken = _ip("-o", "-4", "addr").stdout
    for i in range(256):
        network = f"10.214.{(os.getpid() + i) % 256}"
        if f" {network}." not in taken:
            return network
    raise OSError("all networks 10.214.0.0/24 to 10.214.255.0/24 are in use")


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return _run("ip", *arguments)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    path = shutil.which(command[0], path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))
    if path is None:
        raise OSError(f"{command[0]} is not installed")
    return subprocess.run([path, *command[1:]], check=True, capture_output=True, text=True)


# --- the keeper


class _Keeper:
    """A process that removes what it was told of, once this one asks it to or is gone."""

    def __init__(self) -> None:
        # An interface's name has 15 letters, of which the process's number may take 7.
        self.name = f"{os.getpid()}{string.ascii_lowercase[next(_numbers) % 26]}"
        # A session of its own: signals to the job's terminal or process group do not end it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def watch(self, kind: str, name: str) -> None:
        """Tell it before it is made: then there is no moment at which it could be left behind."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind} {name}\n".encode())
        self._process.stdin.flush()

    def finish(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


_keepers: list[_Keeper] = []
_numbers = itertools.count()


def _keep() -> None:
    """The keeper: read what there is until the other end closes, then remove it, last made first."""
    things = [line.split(maxsplit=1) for line in sys.stdin.read().splitlines()]
    deadline = time.monotonic() + _SETTLING_SECONDS
    for kind, name in reversed(things):
        if kind == "cgroup":
            _remove_group(Path(name), deadline)
        else:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):  # not made after all
                _ip(*{"link": ("link", "del", name), "namespace": ("netns", "del", name)}[kind])


def _remove_group(group: Path, deadline: float) -> None:
    while group.is_dir():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:  # whoever has not ended goes on without a quota
                with contextlib.suppress(OSError):
                    for process in (group / "cgroup.procs").read_text().split():
                        (group.parent / "cgroup.procs").write_text(process)
            time.sleep(0.05)


if __name__ == "__main__":
    _keep()
