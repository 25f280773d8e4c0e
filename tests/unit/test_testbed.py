"""Test beds: what a seat may ask for, that quotas and links hold, and that nothing stays behind."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hexiseq import testbed
from hexiseq.cluster import Cluster, Device, Node, Seat
from tests.unit.plans import make_device

ROOT = Path(__file__).resolve().parent.parent.parent
H100 = make_device("h100", 1, 1, 1)
CPU = dataclasses.replace(H100, type="core", vendor="cpu", kernel="cpu")
WITHOUT_QUOTAS, WITHOUT_NAMESPACES = testbed.lacks_quotas(), testbed.lacks_namespaces()
quotas = pytest.mark.skipif(WITHOUT_QUOTAS is not None, reason=str(WITHOUT_QUOTAS))
namespaces = pytest.mark.skipif(WITHOUT_NAMESPACES is not None, reason=str(WITHOUT_NAMESPACES))


def cluster(*seats: Seat, gb_per_s: float = 1.0, **options) -> Cluster:
    """A node for each seat."""
    nodes = tuple(Node(f"n{i}", (seat,), 1.0, 1, gb_per_s) for i, seat in enumerate(seats))
    return Cluster("bed", nodes, **options)


def left_behind(pid: int) -> list[str]:
    """Control groups, namespaces and links made by a process."""
    groups = [str(path) for root, _ in testbed._roots() for path in root.glob(f"hexiseq-{pid}[a-z]-*")]
    names = [path.name for path in Path("/run/netns").glob(f"hexiseq-{pid}[a-z]-*")]
    return groups + names + [name for _, name in socket.if_nameindex() if name.startswith(f"hx{pid}")]


@pytest.mark.parametrize(
    ("kind", "cores", "quota", "words"),
    [
        (H100, (), 0.5, "quota 0.5 is for CPU ranks"),
        (CPU, (), 0.01, "quota must be a share of a core, 0.05 to 1 here, got 0.01"),
        (CPU, (0,), 1.5, "0.05 to 1 here, got 1.5"),
        (CPU, (), True, "got True"),
        (CPU, (), "half", "got 'half'"),
    ],
)
def test_quotas_that_cannot_be_are_refused(kind: Device, cores: tuple[int, ...], quota: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Seat(kind, cores, quota)


def test_quotas_that_cannot_hold_together_are_refused() -> None:
    seats = (Seat(CPU, (1,), 0.75), Seat(CPU, (1,), 0.5), Seat(CPU, (0,)))
    with pytest.raises(ValueError, match=r"devices on core 1 sum to 1\.25 of it"):
        Cluster("bed", (Node("local", seats, 1.0, 1, 1.0),))
    with pytest.raises(ValueError, match=r"devices on core 1 sum to 1\.25 of it"):  # nodes are on one machine
        Cluster("bed", tuple(Node(f"n{i}", (seat,), 1.0, 1, 1.0) for i, seat in enumerate(seats)))
    # Which core it uses is the system's choice.
    Cluster("bed", (Node("local", (Seat(CPU, (0, 1), 1.5), *seats[1:]), 1.0, 1, 1.0),))


def test_namespaces_cap_links_of_cpu_nodes_alone() -> None:
    config = {
        "name": "bed", "namespaces": True, "gpus": {"core": dataclasses.asdict(CPU)},
        "nodes": [{"name": "a", "devices": [{"type": "core", "quota": 0.5}], "intra_gb_per_s": 1, "nics": 1,
                   "nic_gb_per_s": 1}],
    }  # fmt: skip
    made = Cluster.from_config(config)
    assert made.namespaces
    assert made.places[0].seat.quota == 0.5
    with pytest.raises(ValueError, match="namespaces must be true or false, got 'yes'"):
        Cluster.from_config({**config, "namespaces": "yes"})
    with pytest.raises(ValueError, match="takes no devices of nvidia"):
        cluster(Seat(H100), namespaces=True)
    with pytest.raises(ValueError, match="takes no links"):
        Cluster.from_config({**config, "links": [{"nodes": ["a", "a"], "gb_per_s": 1}]})


def test_nothing_is_made_where_nothing_is_asked_for() -> None:
    with testbed.built(cluster(Seat(CPU), Seat(CPU)).places, False) as berths:
        assert berths == (testbed.Berth(), testbed.Berth())
        assert not left_behind(os.getpid())
        testbed.enter(berths[0])


def test_a_machine_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(testbed, "_roots", lambda: [])
    with pytest.raises(ValueError, match=r"gives no CPU quotas.*no cgroup file system.*run as root.*such as cpu_mixed"):
        testbed.build(cluster(Seat(CPU, (), 0.5)).places, False)
    monkeypatch.setattr(testbed, "_roots", lambda: [(tmp_path / "not there", False)])
    with pytest.raises(ValueError, match="not there: No such file or directory"):
        testbed.build(cluster(Seat(CPU, (), 0.5)).places, False)
    monkeypatch.setattr(testbed, "_run", lambda *command: (_ for _ in ()).throw(OSError(f"no {command[0]}")))
    with pytest.raises(ValueError, match=r"makes no network namespaces.*\(no ip\).*cluster\.namespaces=false"):
        testbed.build(cluster(Seat(CPU)).places, True)
    assert not left_behind(os.getpid())


def test_namespaces_need_a_launcher_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for ranks, here, store in (("4", "2", "True"), ("2", "2", "False")):
        for name, value in (("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", here), ("TORCHELASTIC_USE_AGENT_STORE", store)):
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=r"ranks must be started by python train\.py or torchrun"):
            testbed.build(cluster(Seat(CPU)).places, True)


def test_groups_of_both_kinds_of_cgroup_are_found(tmp_path: Path) -> None:
    old, new = tmp_path / "cpu,cpuacct", tmp_path / "unified"
    for folder in (old / "job", new / "slice" / "job"):
        folder.mkdir(parents=True)
    for folder in (new, new / "slice"):
        (folder / "cgroup.controllers").write_text("cpuset cpu io\n")
        (folder / "cgroup.subtree_control").write_text("cpuset\n")
    (new / "slice" / "job" / "cgroup.controllers").write_text("io\n")
    mounts, own = tmp_path / "mounts", tmp_path / "own"
    mounts.write_text(f"cgroup {old} cgroup rw,cpu,cpuacct 0 0\ncgroup {tmp_path} cgroup rw,cpuset 0 0\n"
                      f"cgroup2 {new} cgroup2 rw 0 0\n")  # fmt: skip
    own.write_text("4:cpu,cpuacct:/job\n2:cpuset:/\n0::/slice/job\n")
    expected = [(old / "job", False), (old, False), (new / "slice", True), (new, True)]
    assert testbed._roots(mounts, own) == expected
    own.write_text("4:cpu,cpuacct:/elsewhere\n0::/../outside\n")  # paths of another cgroup namespace
    assert testbed._roots(mounts, own) == [(old, False), (new, True)]
    assert testbed._roots(tmp_path / "no", own) == []


def test_a_group_of_cgroup_v2_gets_its_share(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("")
    keeper = testbed._Keeper()
    try:
        group = Path(testbed._make_group(keeper, tmp_path, True, "rank", 0.25))
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
        assert (group / "cpu.max").read_text() == "5000 20000"
        (group / "cpu.max").unlink()  # a real group's folder goes with its files
    finally:
        keeper.finish()
    assert not group.exists()


def busy(berth: testbed.Berth, start, seconds: float, answer) -> None:
    """Compute for so long from when all do; CPU seconds over wall seconds."""
    testbed.enter(berth)
    start.wait(300.0)
    wall, cpu = time.monotonic(), time.process_time()
    while time.monotonic() - wall < seconds:
        sum(range(1000))
    answer.send((time.process_time() - cpu) / (time.monotonic() - wall))


def used_at_once(berths: tuple[testbed.Berth, ...]) -> list[float]:
    """CPU seconds over wall seconds of a busy process in each berth."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(berths))
    pipes, processes = [], []
    for berth in berths:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=busy, args=(berth, start, 2.0, theirs)))
        processes[-1].start()
        pipes.append(ours)
    used = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return used


@quotas
def test_quotas_hold() -> None:
    """Never more than its share; and half of it at least, or of what a process without a quota gets beside it, once the
    machine has so much to give: its host may hold it back for a while."""
    shares = (0.2, 0.1, 0.05)
    seats = [Seat(CPU, (), share) for share in shares]
    with testbed.built(cluster(*seats, Seat(CPU)).places, False) as berths:
        assert len(left_behind(os.getpid())) == 3
        assert berths[3] == testbed.Berth()
        deadline, held = time.monotonic() + 60, False
        while not held:
            *used, free = used_at_once(berths)
            assert all(fraction < 1.25 * share for share, fraction in zip(shares, used, strict=True)), used
            held = all(fraction > 0.5 * min(share, free) for share, fraction in zip(shares, used, strict=True))
            assert held or time.monotonic() < deadline, (used, free)
    assert not left_behind(os.getpid())


def listen(berth: testbed.Berth, answer) -> None:
    testbed.enter(berth)
    server = socket.create_server(("0.0.0.0", 0))
    host = os.popen(f"ip -4 -o addr show {testbed.INTERFACE}").read().split()[3].split("/")[0]
    answer.send((host, server.getsockname()[1]))
    connection, _ = server.accept()
    start, received = time.monotonic(), 0
    while data := connection.recv(1 << 16):
        received += len(data)
    answer.send((received, time.monotonic() - start))


def send(berth: testbed.Berth, address: tuple[str, int], size: int) -> None:
    testbed.enter(berth)
    with socket.create_connection(address) as connection:
        connection.sendall(bytes(size))


@namespaces
def test_links_are_capped() -> None:
    context = multiprocessing.get_context("spawn")
    size, cap_gb_per_s = 2_000_000, 0.01
    with testbed.built(cluster(Seat(CPU), Seat(CPU), gb_per_s=cap_gb_per_s, namespaces=True).places, True) as berths:
        assert len(left_behind(os.getpid())) == 2 + 3  # namespaces; the bridge and two links
        ours, theirs = context.Pipe()
        listener = context.Process(target=listen, args=(berths[0], theirs))
        listener.start()
        sender = context.Process(target=send, args=(berths[1], ours.recv(), size))
        sender.start()
        received, seconds = ours.recv()
        for process in (listener, sender):
            process.join()
    assert received == size
    assert seconds > 0.75 * size / (cap_gb_per_s * 1e9)  # the first bytes may pass in one burst
    assert not left_behind(os.getpid())


BUILDER = """
import subprocess, sys, time
from hexiseq import testbed
from tests.unit.test_testbed import CPU, Seat, cluster
berths = testbed.build(cluster(Seat(CPU, (), 0.5), namespaces=True).places, True)
rank = "import sys, time; from hexiseq.testbed import Berth, enter; enter(Berth(sys.argv[1])); print(1); time.sleep(60)"
ranks = subprocess.Popen([sys.executable, "-c", rank, berths[0].cgroup], stdout=subprocess.PIPE)
ranks.stdout.readline()
print(ranks.pid, flush=True)
time.sleep(60)
"""


@quotas
@namespaces
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_stays_behind_a_process_that_is_killed(number: signal.Signals) -> None:
    builder = subprocess.Popen([sys.executable, "-c", BUILDER], cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)  # fmt: skip
    assert builder.stdout is not None
    rank = int(builder.stdout.readline())
    assert len(left_behind(builder.pid)) == 1 + 1 + 2
    builder.send_signal(number)
    builder.wait()
    time.sleep(0.2)
    assert any("hexiseq" in thing for thing in left_behind(builder.pid))  # a rank is still in there
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while left_behind(builder.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_behind(builder.pid)
