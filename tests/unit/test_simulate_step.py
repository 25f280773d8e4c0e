"""The simulated step: what it agrees on with the cost model, what it shows beyond it, and times known by hand."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from pathlib import Path

import pytest

from hexiseq.cluster import Cluster, Link, Node, Seat
from hexiseq.cost import match_places, parameter_traffic, passes, predict, replica_cost
from hexiseq.plan import Plan, RankDevice, make_replica
from hexiseq.schedule import solve
from hexiseq.simulate import StepSimulation, simulate_step, write_trace
from hexiseq.simulate.engine import Clock, SharedWires, Transfer
from hexiseq.testing import draw_plan
from hexiseq.workload import ModelShape, Workload
from tests.unit.plans import draw_offload, with_hosts
from tests.unit.test_schedule import A100, H100, L40S, LLAMA, gpu

CPU = gpu("cpu", 0.07, 0.05, 0.038, vendor="cpu", memory_gb=4.0, hbm_gb_per_s=8.0, overhead_gb=0.4, kernel="cpu")
LLAMA_13B = ModelShape("llama_13b", 40, 5120, 13824, 40, 40, 128, 32000)
ATTENTION = ModelShape("attention", 4, 256, 256, 32, 32, 128, 256)  # next to no parameters
WINDOWED = dataclasses.replace(LLAMA, window=4096, full_layers=8)
TINY = dataclasses.replace(LLAMA, name="eight layers", layers=8)
TWO_LAYERS = dataclasses.replace(LLAMA, layers=2)
TYPES = {"h100": (H100, 450.0), "a100": (A100, 300.0), "l40s": (L40S, 31.0)}


def cluster(nic: float = 25.0, per_node: int = 4, links: tuple[Link, ...] = (), **nodes: int) -> Cluster:
    """So many nodes of each type, alike inside."""
    classes = tuple(
        Node(name, (Seat(TYPES[name][0]),) * per_node, TYPES[name][1], 1, nic, count) for name, count in nodes.items()
    )
    return Cluster("test", classes, links)


def job(model: ModelShape = LLAMA, seq_len: int = 262144, **changes) -> Workload:
    values = dict(dtype="bfloat16", recompute="selective", sequences=1, accumulation=1, keep_parameters=False)
    return Workload(model, seq_len, **{**values, **changes})


def repeated(plan: Plan, whole: Cluster, count: int) -> Plan:
    """`count` replicas laid out as the only one of `plan`, each on the next nodes of a larger cluster."""
    (replica,), devices, replicas = plan.replicas, [], []
    free = defaultdict(list)
    for place in whole.places:
        free[place.device.type].append(place)
    for i in range(count):
        first = i * plan.world_size
        groups = tuple(
            dataclasses.replace(
                group, shards=tuple(dataclasses.replace(s, rank=s.rank + first) for s in group.shards)
            )
            for group in replica.groups
        )  # fmt: skip
        replicas.append(dataclasses.replace(replica, groups=groups))
        seats = [free[device.type].pop(0) for device in plan.devices]
        devices += [RankDevice(p.device.type, p.node_name, p.device.kernel) for p in seats]
    return dataclasses.replace(plan, replicas=tuple(replicas), devices=tuple(devices), predicted=None)


def solved(whole: Cluster, workload: Workload, policy: str = "hexiseq", exchange: str | None = None) -> Plan:
    """The policy's plan, its calls fused no wider than the window of any group that waits for them."""
    plan = solve(whole, workload, policy, rivals=False, exchange=exchange)
    narrowest = min(group.slots for replica in plan.replicas for group in replica.groups)
    return dataclasses.replace(plan, fusion=min(plan.fusion, narrowest))


def manual(whole: Cluster, workload: Workload, replicas: list, kinds: list[str], slot: int, fusion: int = 1) -> Plan:
    """A plan from counts of its replicas; `kinds` are the ranks' types, each on the next free device."""
    free = {kind: [place for place in whole.places if place.node_class.name == kind] for kind in kinds}
    seats = [free[kind].pop(0) for kind in kinds]
    return Plan(
        policy="manual", seq_len=workload.seq_len, num_heads=workload.model.heads,
        num_kv_heads=workload.model.kv_heads, slot=slot, fusion=fusion, exchange="ring", recompute=workload.recompute,
        dtype=workload.dtype, replicas=tuple(make_replica(workload.seq_len, slot, groups) for groups in replicas),
        devices=tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in seats),
    )  # fmt: skip


def drawn(seed: int, exchange: str = "ring") -> tuple[Plan, Cluster, Workload]:
    """A small plan drawn at random, with ranks without tokens and without heads, on one node or two."""
    plan = draw_plan(seed, dtype="float32", exchange=exchange)
    model = ModelShape("drawn", 2, 64, 128, plan.num_heads, plan.num_kv_heads, 16, 1000)
    near, far = plan.world_size // 2, plan.world_size - plan.world_size // 2
    seats = (Seat(CPU),)
    nodes = [Node(name, seats * count, 1.0, 1, 0.5) for name, count in (("here", near), ("there", far)) if count]
    devices = [RankDevice("cpu", "here" if rank < near else "there", "cpu") for rank in range(plan.world_size)]
    plan = dataclasses.replace(plan, devices=tuple(devices), recompute=("none", "selective", "full")[seed % 3])
    plan = dataclasses.replace(plan, offload=draw_offload(seed, plan.recompute))
    workload = job(
        model, plan.seq_len, dtype="float32", recompute=plan.recompute, sequences=len(plan.replicas),
        offload=plan.offload,
    )  # fmt: skip
    return plan, with_hosts(Cluster("drawn", tuple(nodes)), 100.0, 0.01), workload


MIXED = {"h100": 1, "a100": 1}
AGREE = {
    "ring": (cluster(200, **MIXED), job(), {"exchange": "ring"}),
    "gathered": (cluster(200, **MIXED), job(), {"exchange": "allgather"}),
    "16 devices": (cluster(200, 8, **MIXED), job(seq_len=524288), {}),
    "one node": (cluster(200, 8, h100=1), job(seq_len=131072), {}),
    "13B": (cluster(200, **MIXED), job(LLAMA_13B), {"exchange": "ring"}),
    "no recompute": (cluster(200, **MIXED), job(TINY, recompute="none", seq_len=131072), {}),
    "full recompute": (cluster(200, **MIXED), job(recompute="full"), {"exchange": "ring"}),
    "offload": (with_hosts(cluster(200, **MIXED), 1000.0, 25.0), job(offload=True), {}),
    "slow copies to hosts": (
        with_hosts(cluster(200, **MIXED), 1000.0, 1.0),
        job(offload=True, accumulation=2),
        {"exchange": "ring"},
    ),
    "accumulation": (cluster(200, **MIXED), job(TINY, accumulation=4, seq_len=131072), {}),
    "kept parameters": (cluster(200, **MIXED), job(TINY, keep_parameters=True, seq_len=131072), {}),
    "two sequences": (cluster(200, **MIXED), job(sequences=2, seq_len=131072), {}),
    "three types": (cluster(100, 4, h100=1, a100=1, l40s=1), job(), {}),
    "replicas": (cluster(200, **MIXED), job(seq_len=32768, sequences=8), {}),
    "even ring": (cluster(200, **MIXED), job(), {"policy": "ring"}),
    "even heads": (cluster(200, 8, a100=1), job(seq_len=131072), {"policy": "ulysses"}),
    "windows": (cluster(200, **MIXED), job(WINDOWED), {"exchange": "ring"}),
}


@pytest.mark.parametrize("case", AGREE)
def test_agrees_with_the_cost_model_where_nothing_stalls(case: str) -> None:
    whole, workload, options = AGREE[case]
    plan = solved(whole, workload, **options)
    simulation = simulate_step(plan, whole, workload)
    assert simulation.step_seconds == pytest.approx(predict(plan, whole, workload).step_seconds, rel=0.03)
    assert simulation.tokens_per_second == pytest.approx(workload.tokens_per_step / simulation.step_seconds)


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_agrees_on_several_replicas(exchange: str) -> None:
    half, whole = cluster(200, **MIXED), cluster(200, h100=3, a100=3)
    one = solved(half, job(), exchange=exchange)
    plan, workload = repeated(one, whole, 3), job(sequences=3)
    simulation = simulate_step(plan, whole, workload)
    assert simulation.step_seconds == pytest.approx(predict(plan, whole, workload).step_seconds, rel=0.03)
    assert [len(groups) for groups in simulation.buffers] == [len(one.replicas[0].groups)] * 3


def dealt(count: int, exchange: str, nic: float) -> tuple[Plan, Cluster, Workload]:
    """Replicas of a device of each of four nodes: all that they exchange crosses NICs, and at the same time."""
    slot = 1024
    whole = cluster(nic, count, h100=2, a100=2)
    workload = job(seq_len=128 * slot, sequences=count, recompute="full")
    replicas = [
        [(n, [(count * node + i, n * slot // 2, 16) for node in nodes]) for n, nodes in ((98, (0, 1)), (30, (2, 3)))]
        for i in range(count)
    ]
    plan = manual(whole, workload, replicas, ["h100"] * 2 * count + ["a100"] * 2 * count, slot, fusion=16)
    return dataclasses.replace(plan, exchange=exchange), whole, workload


@pytest.mark.parametrize("nic", [25.0, 100.0])
@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_replicas_with_ranks_on_the_same_nodes_share_their_nics(exchange: str, nic: float) -> None:
    four, one = predict(*dealt(4, exchange, nic)), predict(*dealt(1, exchange, nic))
    assert simulate_step(*dealt(4, exchange, nic)).step_seconds == pytest.approx(four.step_seconds, rel=0.03)
    assert four.all_to_all_seconds == pytest.approx(4 * one.all_to_all_seconds)


def test_replicas_wait_for_one_another_at_parameters_alone() -> None:
    # The second replica, on slow devices, takes as much as the first, which has to keep its pace.
    whole, workload = cluster(200, **MIXED), job(seq_len=32768, sequences=2)
    replicas = [[(1, [(first + m, 8192, 8) for m in range(4)])] for first in (0, 4)]
    plan = manual(whole, workload, replicas, ["h100"] * 4 + ["a100"] * 4, 32768)
    simulation = simulate_step(plan, whole, workload)
    assert simulation.step_seconds == pytest.approx(predict(plan, whole, workload).step_seconds, rel=0.05)
    assert simulation.ranks[0].stall > 0.5 * simulation.step_seconds
    assert simulation.stalls[0].rank < 4 <= simulation.stalls[0].peer
    assert (simulation.stalls[0].kind, simulation.stalls[0].late) in (("gather", True), ("reduce", True))


def test_calls_fused_wider_than_the_window_before_them_stall() -> None:
    # Groups of nine slots beside groups of three: gradients of eight fused slots come late for those that wait three.
    slots, slot = [3, 3, 9, 9], 10924
    whole, workload = cluster(200, h100=2, a100=2), job(TINY, 24 * slot - 1000)
    counts = []
    for g, n in enumerate(slots):
        owned = n * slot - (1000 if g == 0 else 0)
        counts.append((n, [(4 * g + m, owned // 4 + (m < owned % 4), 8) for m in range(4)]))
    wide = manual(whole, workload, [counts], ["a100"] * 8 + ["h100"] * 8, slot, fusion=8)
    narrow = dataclasses.replace(wide, fusion=3)
    stalling, fused = simulate_step(wide, whole, workload), simulate_step(narrow, whole, workload)
    assert stalling.step_seconds > 1.05 * predict(wide, whole, workload).step_seconds
    assert {(stall.kind, stall.late) for stall in stalling.stalls[:8]} <= {("dkv", True), ("kv", True)}
    assert fused.step_seconds == pytest.approx(predict(narrow, whole, workload).step_seconds, rel=0.03)


@pytest.fixture(scope="module")
def plain() -> tuple[Plan, Cluster, Workload, StepSimulation]:
    whole, workload = cluster(200, **MIXED), job()
    plan = solved(whole, workload, exchange="ring")
    return plan, whole, workload, simulate_step(plan, whole, workload)


def test_ranks_add_up_and_phases_follow_one_another(plain) -> None:
    _, _, workload, simulation = plain
    for times in simulation.ranks:
        assert times.busy + times.exchange + times.stall == pytest.approx(simulation.step_seconds)
        assert min(times.busy, times.exchange, times.stall) >= 0
    assert 0.9 < simulation.utilisation < 1
    for before, after in zip(simulation.phases, simulation.phases[1:], strict=False):
        assert before.end == after.start
    for name in ("forward", "backward"):
        assert sum(phase.repeats for phase in simulation.phases if phase.name == name) == workload.model.layers
    total = sum(phase.repeats * (phase.end - phase.start) for phase in simulation.phases)
    assert total == pytest.approx(simulation.step_seconds)


def test_layers_in_the_middle_stand_for_all() -> None:
    whole, workload = cluster(200, **MIXED), job(TINY, seq_len=131072)
    plan = solved(whole, workload, exchange="ring")
    few, every = (simulate_step(plan, whole, workload, layers=layers) for layers in (3, TINY.layers))
    assert few.step_seconds == pytest.approx(every.step_seconds, rel=2e-3)
    assert [t.busy for t in few.ranks] == pytest.approx([t.busy for t in every.ranks])
    assert {phase.repeats for phase in few.phases if phase.layer == 1} == {TINY.layers - 2}
    assert all(phase.repeats == 1 for phase in every.phases)


def test_buffers_are_what_the_window_needs(plain) -> None:
    plan, whole, workload, simulation = plain
    groups = plan.replicas[0].groups
    for group, most in zip(groups, simulation.buffers[0], strict=True):
        assert 0 < most <= group.slots + 3 * plan.fusion
    narrow = simulate_step(dataclasses.replace(plan, fusion=1), whole, workload, window=1)
    assert max(narrow.buffers[0]) <= 1 + 3
    gathered = simulate_step(dataclasses.replace(plan, exchange="allgather"), whole, workload)
    # All that is inner, whole, and of what is outer the front halves.
    sizes = [group.slots for group in groups]
    inner = [sum(sizes[g + 1 :]) + sum(sizes[:g]) / 2 for g in range(len(sizes))]
    assert list(gathered.buffers[0]) == pytest.approx(inner, abs=0.5)


def test_a_receive_window_of_one_slot_stalls() -> None:
    # A slot takes about a tick from node to node, a half-slot half of it: received early, they even out.
    slots, kinds, slot = [6, 2, 6, 2], ["h100", "a100"] * 2, 8192
    whole, workload = cluster(10, 1, h100=2, a100=2), job(ATTENTION, sum(slots) * slot)
    counts = [(n, [(rank, n * slot, 32)]) for rank, n in enumerate(slots)]
    plan = manual(whole, workload, [counts], kinds, slot)
    wide, narrow = simulate_step(plan, whole, workload), simulate_step(plan, whole, workload, window=1)
    assert narrow.step_seconds > 1.03 * wide.step_seconds
    assert narrow.stalls[0].kind == "dkv"
    with pytest.raises(ValueError, match="a receive window of 1 slots is too small"):
        simulate_step(dataclasses.replace(plan, fusion=4), whole, workload, window=1)


def test_a_slow_link_is_named() -> None:
    workload = job()
    fast = cluster(200, h100=1, a100=1)
    plan = solved(fast, workload, exchange="ring")
    slow = cluster(200, links=(Link(("h100", "a100"), 4.0),), **MIXED)
    simulation = simulate_step(plan, slow, workload)
    assert simulation.step_seconds > 1.2 * simulate_step(plan, fast, workload).step_seconds
    assert simulation.step_seconds >= 0.999 * predict(plan, slow, workload).step_seconds
    worst = simulation.stalls[0]
    assert worst.wire in ("link from h100 to a100", "link from a100 to h100")
    assert worst.seconds > 0.05 * simulation.step_seconds


def test_a_straggler_is_named(plain) -> None:
    plan, whole, workload, simulation = plain
    slowed = simulate_step(plan, whole, workload, stragglers={2: 1.5})
    assert slowed.ranks[2].busy == pytest.approx(1.5 * simulation.ranks[2].busy)
    assert slowed.step_seconds > 1.3 * simulation.step_seconds
    assert (slowed.stalls[0].peer, slowed.stalls[0].late) == (2, True)
    assert slowed.ranks[2].stall == min(times.stall for times in slowed.ranks)


def test_jitter_is_seeded_and_costs_time(plain) -> None:
    plan, whole, workload, simulation = plain
    noisy = [simulate_step(plan, whole, workload, jitter=0.1, seed=seed) for seed in (1, 1, 2)]
    assert noisy[0] == noisy[1]
    assert noisy[0].step_seconds != noisy[2].step_seconds
    for run in noisy:
        assert 1.0 < run.step_seconds / simulation.step_seconds < 1.3
        mean = sum(t.busy for t in run.ranks) / sum(t.busy for t in simulation.ranks)
        assert mean == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("exchange", ["ring", "allgather"])
def test_work_and_bytes_are_the_cost_models(exchange: str) -> None:
    for seed in range(24):
        plan, whole, workload = drawn(seed, exchange)
        places, model, world = match_places(plan, whole), workload.model, plan.world_size
        forwards, linears = passes(workload.recompute)
        simulation = simulate_step(plan, whole, workload, trace=True)
        busy, expected = [0.0] * world, defaultdict(float)
        for replica in plan.replicas:
            cost = replica_cost(plan, replica, workload, places)
            kernels = linears * cost.linear + forwards * (cost.attention_forward + cost.merge_forward)
            kernels = model.layers * (kernels + cost.attention_backward + cost.merge_backward) + cost.loss
            heads_in, heads_out, grads_in, grads_out = cost.exchange.matrix()
            sent = {
                "all-to-all": forwards * (heads_in + heads_out) + grads_in + grads_out,
                "kv": (forwards + 1) * cost.kv.matrix()[0],
                "dkv" if exchange == "ring" else "dkv return": cost.dkv.matrix()[0],
            }
            for i, rank in enumerate(cost.ranks.tolist()):
                busy[rank] = float(kernels[i])
                if workload.offload:  # all but the last layer's input, out and back
                    tokens = max(1, plan.shard(rank).num_tokens) * replica.sequences
                    expected["host copy", rank, rank] = 2 * (model.layers - 1) * tokens * model.hidden * 4
                for kind, matrix in sent.items():
                    for j, peer in enumerate(cost.ranks.tolist()):
                        expected[kind, rank, peer] += model.layers * float(matrix[i, j])
        found, around = defaultdict(float), defaultdict(float)
        for span in simulation.spans:
            if span.peer is None:
                busy[span.rank] += (span.name == "optimizer") * (span.end - span.start)
            elif span.name in ("gather", "reduce"):
                around[span.peer] += span.size
            else:
                found[span.name, span.peer, span.rank] += span.size
        assert [t.busy for t in simulation.ranks] == pytest.approx(busy), seed
        assert found == pytest.approx({key: size for key, size in expected.items() if size}), seed
        if world > 1:
            assert list(around.values()) == pytest.approx([parameter_traffic(workload, world)] * world), seed


def test_trace_is_what_was_simulated(tmp_path: Path) -> None:
    whole, workload = cluster(50, **MIXED), job(TWO_LAYERS, accumulation=2)
    simulation = simulate_step(solved(whole, workload, exchange="ring"), whole, workload, trace=True)
    write_trace(simulation, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["node a100", "node h100"]
    lanes = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(lanes) <= set(names)
    for spans in lanes.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - 1e-3
    busy = {names[lane]: sum(b - a for a, b in spans) / 1e6 for lane, spans in lanes.items()}
    for rank, (device, times) in enumerate(zip(simulation.devices, simulation.ranks, strict=True)):
        assert busy[f"rank {rank} {device.type}: compute"] == pytest.approx(times.busy)
        assert processes[next(pid for (pid, tid), n in names.items() if n.startswith(f"rank {rank} "))] == (
            f"node {device.node}"
        )
    with pytest.raises(ValueError, match="trace=True"):
        write_trace(simulate_step(solved(whole, workload), whole, workload), tmp_path / "none.json")


# Wires ---------------------------------------------------------------------------------------------------------


def carried(whole: Cluster, *transfers: tuple[float, str, int, int, float]) -> list[float]:
    """When transfers ``(start, kind, sender, receiver, GB)`` end."""
    clock = Clock()
    wires, made = SharedWires(clock, whole, whole.places), []
    for start, kind, sender, receiver, size in transfers:
        made.append(Transfer(kind, sender, receiver, size * 1e9))
        clock.at(start, lambda transfer=made[-1]: wires.carry(transfer, transfer.sender))
    clock.run()
    assert all(transfer.done for transfer in made)
    return [transfer.ended for transfer in made]


def test_wires_are_shared_fairly() -> None:
    two = cluster(10, 2, h100=1, a100=2)  # ranks 0, 1 | 2, 3 | 4, 5
    # Two share the NIC out of the first node; when the shorter one is done the other has it alone.
    assert carried(two, (0, "a", 0, 2, 10), (0, "a", 1, 3, 20)) == pytest.approx([2, 3])
    # The later one takes half of it from then on.
    assert carried(two, (0, "a", 0, 2, 20), (1, "a", 1, 3, 20)) == pytest.approx([3, 4])
    # Three into node 2 get a third each; what the first's own NIC has left goes to its other transfer.
    assert carried(two, (0, "a", 0, 2, 10), (0, "a", 4, 2, 10), (0, "a", 5, 3, 10), (0, "a", 1, 4, 10)) == (
        pytest.approx([3, 3, 3, 1.5])
    )
    # Inside a node each rank has its port, and both directions go at one time.
    assert carried(two, (0, "a", 0, 1, 450), (0, "a", 1, 0, 450), (0, "a", 0, 2, 10)) == pytest.approx([1, 1, 1])
    # Those of one kind between two ranks follow one another, others do not wait for them.
    assert carried(two, (0, "a", 0, 2, 10), (0, "a", 0, 2, 10), (0, "b", 0, 2, 10)) == pytest.approx([2, 3, 2])
    assert carried(two, (0, "a", 0, 2, 0), (1, "a", 0, 2, 0)) == [0, 1]


def test_a_special_link_limits_its_pair_alone() -> None:
    linked = dataclasses.replace(cluster(10, 2, h100=1, a100=2), links=(Link(("h100", "a100-0"), 2.0),))
    assert carried(linked, (0, "a", 0, 2, 2), (0, "a", 1, 4, 16), (0, "a", 2, 0, 2)) == pytest.approx([1, 1.8, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"jitter": -0.1}, r"jitter must be a number from 0 to 1, got -0\.1"),
        ({"jitter": True}, "jitter must be a number from 0 to 1, got True"),
        ({"stragglers": {8: 2.0}}, "straggler 8 is not a rank of the plan: they are 0 to 7"),
        ({"stragglers": {1: 0}}, "the factor of straggler 1 must be a positive number, got 0"),
        ({"stragglers": [1]}, r"stragglers must be factors by rank, such as \{3: 1.5\}, got \[1\]"),
        ({"seed": 1.5}, r"seed must be an integer, got 1\.5"),
        ({"layers": 2}, "at least 3, got 2"),
        ({"window": 0}, "at least 1 slot, got 0"),
    ],
)
def test_refusals(plain, options: dict, message: str) -> None:
    plan, whole, workload, _ = plain
    with pytest.raises(ValueError, match=message):
        simulate_step(plan, whole, workload, **options)


def test_a_plan_for_another_job_is_refused(plain) -> None:
    plan, whole, workload, _ = plain
    with pytest.raises(ValueError, match="the plan's seq_len is 262144, the workload's 131072"):
        simulate_step(plan, whole, dataclasses.replace(workload, seq_len=131072))
    with pytest.raises(ValueError, match="offload: device type h100_sxm has no host_gb_per_s"):
        simulate_step(dataclasses.replace(plan, offload=True), whole, dataclasses.replace(workload, offload=True))
