"""Clusters, models and plans drawn at random, for tests that judge cost model, bound and scheduler."""

import dataclasses
import itertools
import math
import random

from hexiseq.cluster import Cluster, Device, Link, Node, Seat
from hexiseq.plan import Plan, RankDevice, group_intervals, make_replica
from hexiseq.workload import ModelShape, Workload


def between(rng, low, high):
    """A number between two, evenly over their magnitudes."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def make_device(name, gemm, forward, backward, memory=1e6, **changes):
    values = dict(
        type=name, vendor="nvidia", peak_tflops=2 * gemm, gemm_tflops=gemm, attention_forward_tflops=forward,
        attention_backward_tflops=backward, memory_gb=memory, hbm_gb_per_s=2000.0, overhead_gb=1.0, launch_us=5.0,
        dtypes=("bfloat16", "float32", "float64"), kernel="torch_flash", source="test",
    )  # fmt: skip
    return Device(**{**values, **changes})


def split(rng, total, parts, least=0):
    """`total` cut into `parts` at random, skewed down to none at all."""
    weights = [rng.choice((0, 1, 1, 3, 9)) * rng.random() + 1e-9 for _ in range(parts)]
    return proportional(total - least * parts, weights, least)


def proportional(total, weights, base=0):
    """`total` cut into whole numbers near the given proportions, plus `base` each."""
    edges = [round(total * sum(weights[:i]) / sum(weights)) for i in range(len(weights) + 1)]
    return [b - a + base for a, b in itertools.pairwise(edges)]


def draw_curves(rng, longest):
    """Curves of attention over the edges of tiles, or none."""
    found = {}
    for name in ("attention_curve", "causal_curve"):
        points = rng.choice((0, 0, 1, 2, 4))
        edges = sorted({round(between(rng, 1, longest), 3) for _ in range(points)})
        fractions = sorted(rng.uniform(0.1, 1) for _ in edges)
        if name == "attention_curve" and fractions:
            fractions[-1] = 1.0
        found[name] = tuple(zip(edges, fractions, strict=True))
    return found


def draw_nodes(rng, devices, intra, nic, most_nodes=4, most_seats=4):
    """Node classes of one to two nodes, with one to a few of the devices each; bandwidths between the given two."""
    return tuple(
        Node(
            f"class{i}", tuple(Seat(rng.choice(devices)) for _ in range(rng.randint(1, most_seats))),
            between(rng, *intra), rng.choice((1, 1, 2)), between(rng, *nic), count=rng.choice((1, 1, 2)),
        )
        for i in range(rng.randint(1, most_nodes))
    )  # fmt: skip


def draw_links(rng, nodes, bandwidth):
    """Special links between classes, nodes of a class and single nodes, each pair named in one way alone."""
    names = {node.name: [node.name] if node.count == 1 else [f"{node.name}-{i}" for i in range(node.count)]
             for node in nodes}  # fmt: skip
    links = []
    for a, b in itertools.combinations_with_replacement(names, 2):
        if rng.random() < 0.5 or (a == b and len(names[a]) == 1):
            continue
        if rng.random() < 0.5:
            links.append(Link((a, b), between(rng, *bandwidth)))
        elif a != b:
            links.append(Link((rng.choice(names[a]), rng.choice(names[b])), between(rng, *bandwidth)))
    return tuple(links)


def plan_over(seats, replicas, model, seq_len, slot, **changes):
    """A plan from counts.

    Args:
        seats: the place of each rank.
        replicas: ``(sequences, [(slots, [(rank, tokens, heads), ...]), ...])`` of each.
    """
    made = tuple(make_replica(seq_len, slot, groups, sequences) for sequences, groups in replicas)
    values = dict(
        policy="manual", seq_len=seq_len, num_heads=model.heads, num_kv_heads=model.kv_heads, slot=slot, fusion=1,
        exchange="ring", recompute="none", dtype="float32", replicas=made,
        devices=tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in seats),
    )  # fmt: skip
    return Plan(**{**values, **changes})


def group_tokens(seq_len, slot, slots):
    return [b - a + d - c for (a, b), (c, d) in group_intervals(seq_len, slot, slots)]


def draw_replicas(rng, ranks, count, most_group=4):
    """The ranks shuffled, dealt to `count` replicas and cut into groups."""
    ranks = rng.sample(ranks, len(ranks))
    found = []
    for size in split(rng, len(ranks), count, least=1):
        mine, ranks = ranks[:size], ranks[size:]
        groups = []
        while mine:
            width = rng.randint(1, min(most_group, len(mine)))
            groups.append(mine[:width])
            mine = mine[width:]
        found.append(groups)
    return found


def workload_of(plan, model, **changes):
    values = dict(
        model=model, seq_len=plan.seq_len, dtype=plan.dtype, recompute=plan.recompute, sequences=plan.sequences,
        accumulation=1, keep_parameters=False, offload=plan.offload,
    )  # fmt: skip
    return Workload(**{**values, **changes})


def with_memory(cluster, memory):
    """The cluster with the memory of each device type, in GB, where one is given."""

    def changed(node):
        seats = tuple(
            dataclasses.replace(seat, device=dataclasses.replace(seat.device, memory_gb=memory[seat.device.type]))
            if seat.device.type in memory else seat
            for seat in node.seats
        )  # fmt: skip
        return dataclasses.replace(node, seats=seats)

    return Cluster(cluster.name, tuple(changed(node) for node in cluster.nodes), cluster.links)


def draw_offload(seed, recompute):
    """Whether a plan offloads; where it can, every other one does."""
    return recompute != "none" and random.Random(f"offload {seed}").random() < 0.5


def with_hosts(cluster, memory, gb_per_s=None):
    """The cluster with so many GB of memory in each host, a number or a function of the node, and devices that copy
    to it at a rate."""

    def changed(node):
        seats = node.seats
        if gb_per_s is not None:
            kinds = {id(s.device): dataclasses.replace(s.device, host_gb_per_s=gb_per_s) for s in seats}
            seats = tuple(dataclasses.replace(seat, device=kinds[id(seat.device)]) for seat in seats)
        gb = memory(node) if callable(memory) else memory
        return dataclasses.replace(node, seats=seats, host_memory_gb=gb)

    return dataclasses.replace(cluster, nodes=tuple(map(changed, cluster.nodes)))


def draw_small(seed):
    """A small cluster, a plan for some of its devices and the workload; whatever the cost model knows is in some draw.

    Sizes are such that now matrices, now attention, launches, merges, all-to-all, the exchange across groups or
    parameters take longest. 1 to 3 replicas of 1 to 3 sequences, in any way over the nodes; 1 to 6 groups of 1 to 4.
    """
    rng = random.Random(seed)
    devices = [
        make_device(
            f"d{i}", between(rng, 1e-4, 1e-2), between(rng, 1e-4, 1e-2), between(rng, 1e-4, 1e-2),
            hbm_gb_per_s=between(rng, 0.1, 100), launch_us=rng.choice((0.0, between(rng, 0.1, 50))),
            **draw_curves(random.Random(f"curves {seed} {i}"), 64),
            host_gb_per_s=between(random.Random(f"host {seed} {i}"), 5e-4, 0.5),
        )
        for i in range(rng.randint(1, 3))
    ]  # fmt: skip
    nodes = draw_nodes(rng, devices, (0.003, 30), (0.003, 30))
    cluster = Cluster("drawn", nodes, draw_links(rng, nodes, (0.003, 30)) if rng.random() < 0.5 else ())
    cluster = with_hosts(cluster, 1e6)
    places = rng.sample(cluster.places, rng.randint(max(1, len(cluster.places) - 2), len(cluster.places)))
    ratio, kv = rng.randint(1, 4), rng.randint(1, 4)
    count = min(len(places), rng.choice((1, 1, 1, 2, 3)))
    grouped = draw_replicas(rng, range(len(places)), count)
    shares = [[rng.choice((1, 1, 2, 3, 5)) for _ in groups] for groups in grouped]
    total = max(map(sum, shares))
    for slots in shares:  # all replicas cover the same sequence with as many slots
        slots[rng.randrange(len(slots))] += total - sum(slots)
    half = rng.randint(1, 4)
    seq_len = max(2, total * 2 * half - rng.choice((0, 0, rng.randint(0, half), half)))
    window = rng.choice((None, None, rng.randint(1, seq_len), rng.randint(1, 8)))
    layers = rng.randint(1, 4)
    model = ModelShape(
        "m", layers, rng.choice((8, 64)), rng.choice((8, 96)), ratio * kv, kv, rng.choice((4, 16)),
        rng.choice((20, 300)), rng.random() < 0.5, window, rng.randint(0, layers - 1) if window else 0,
    )  # fmt: skip
    replicas = []
    for groups, slots in zip(grouped, shares, strict=True):
        laid = []
        for members, n, tokens in zip(groups, slots, group_tokens(seq_len, 2 * half, slots), strict=True):
            sizes, heads = split(rng, tokens, len(members)), split(rng, model.heads, len(members))
            laid.append((n, list(zip(members, sizes, heads, strict=True))))
        replicas.append((rng.randint(1, 3), laid))
    plan = plan_over(
        places, replicas, model, seq_len, 2 * half, fusion=rng.randint(1, 4),
        exchange=rng.choice(("ring", "allgather")), recompute=rng.choice(("none", "selective", "full")),
        dtype=rng.choice(("float32", "bfloat16", "float64")),
    )  # fmt: skip
    plan = dataclasses.replace(plan, offload=draw_offload(seed, plan.recompute))
    work = workload_of(plan, model, accumulation=rng.choice((1, 1, 3)), keep_parameters=rng.random() < 0.5)
    return plan, cluster, work


@dataclasses.dataclass(frozen=True)
class Layout:
    """A plan as counts, to be changed and built again.

    Attributes:
        replicas: ``[sequences, [(slots, [(rank, tokens, heads), ...]), ...]]`` of each.
    """

    places: tuple
    model: ModelShape
    seq_len: int
    slot: int
    replicas: list
    choices: dict

    def plan(self):
        return plan_over(self.places, self.replicas, self.model, self.seq_len, self.slot, **self.choices)

    def changed(self, rng):
        """The same with a slot, some tokens or some heads moved from one to another, or other fusion or exchange."""
        replicas = [[sequences, [(n, list(members)) for n, members in groups]] for sequences, groups in self.replicas]
        choices = dict(self.choices)
        groups = rng.choice(replicas)[1]
        kind = rng.choice(("slot", "tokens", "tokens", "heads", "heads", "choices"))
        g = rng.randrange(len(groups))
        members = groups[g][1]
        if kind == "choices":
            choices.update(fusion=rng.choice((1, 2, 4, 8)), exchange=rng.choice(("ring", "allgather")))
        elif kind == "slot" and len(groups) > 1 and groups[g][0] > 1:
            taker = rng.choice([i for i in range(len(groups)) if i != g])
            slots = [n + (i == taker) - (i == g) for i, (n, _) in enumerate(groups)]
            sizes = group_tokens(self.seq_len, self.slot, slots)
            for i, (_, held) in enumerate(list(groups)):
                tokens = proportional(sizes[i], [t + 1e-6 for _, t, _ in held])
                groups[i] = (slots[i], [(r, t, h) for (r, _, h), t in zip(held, tokens, strict=True)])
        elif len(members) > 1:
            a, b = rng.sample(range(len(members)), 2)
            at = 1 if kind == "tokens" else 2
            little = 1 if kind == "heads" else max(1, members[a][1] // 16)
            moved = rng.randint(0, members[a][at]) if rng.random() < 0.3 else min(members[a][at], little)
            for member, change in ((a, -moved), (b, moved)):
                entry = list(members[member])
                entry[at] += change
                members[member] = tuple(entry)
        return dataclasses.replace(self, replicas=replicas, choices=choices)


def draw_large(seed):
    """A cluster of GPUs, a layout for some of them and the workload: sequences of some hundred to 300k tokens.

    Half of the layouts are dealt at random, half by what each device can do, and half of the clusters have next to no
    cost but compute, so that some plans are about as good as there are.
    """
    rng = random.Random(seed)
    ideal = rng.random() < 0.5
    same_ratio = rng.random() < 0.5  # of attention to matrices on every type
    devices = []
    for i in range(rng.randint(1, 4)):
        gemm = between(rng, 30, 900)
        forward = gemm * (0.75 if same_ratio else rng.uniform(0.3, 1))
        devices.append(make_device(
            f"d{i}", gemm, forward, forward * (0.9 if same_ratio else rng.uniform(0.5, 1)),
            hbm_gb_per_s=1e9 if ideal else between(rng, 300, 5000), launch_us=0.0 if ideal else 8.0,
            **({} if ideal else draw_curves(random.Random(f"curves {seed} {i}"), 1e5)),
            host_gb_per_s=1e9 if ideal else between(random.Random(f"host {seed} {i}"), 1, 60),
        ))  # fmt: skip
    nodes = draw_nodes(rng, devices, (20, 500), (0.05, 100))
    if ideal and rng.random() < 0.7:
        nodes = tuple(dataclasses.replace(node, intra_gb_per_s=1e6, nic_gb_per_s=1e6) for node in nodes)
    cluster = Cluster("drawn", nodes, draw_links(rng, nodes, (0.1, 200)) if rng.random() < 0.3 else ())
    cluster = with_hosts(cluster, 1e6)
    places = cluster.places
    if rng.random() < 0.4:
        places = tuple(rng.sample(places, rng.randint(1, len(places))))
    ratio, kv = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 4, 8))
    hidden = rng.choice((128, 1024, 4096))
    model = ModelShape(
        "m", rng.randint(2, 8), hidden, rng.choice((hidden // 8, hidden, 4 * hidden)), ratio * kv, kv,
        rng.choice((32, 128)), rng.choice((1000, 32000)), rng.random() < 0.5,
    )  # fmt: skip
    seq_len = int(between(rng, 400, 300_000))
    if rng.random() < 0.25:
        window = rng.randint(1, seq_len)
        model = dataclasses.replace(model, window=window, full_layers=rng.randint(0, model.layers - 1))

    matched = rng.random() < 0.6
    speed = {r: places[r].device.gemm_tflops if matched else rng.random() + 1e-3 for r in range(len(places))}
    attends = {r: places[r].device.attention_forward_tflops if matched else rng.random() + 1e-3
               for r in range(len(places))}  # fmt: skip
    grouped = draw_replicas(rng, range(len(places)), min(len(places), rng.choice((1, 1, 2, 3))), rng.choice((1, 4)))
    most = max(map(len, grouped))
    total = rng.randint(most, max(most, min(64, seq_len // 4)))
    slot = 2 * -(-seq_len // (2 * total))
    while total * slot - seq_len > slot // 2 or total * slot < seq_len:
        total, slot = total - 1, 2 * -(-seq_len // (2 * (total - 1)))
        if total < most:
            total, slot = -(-seq_len // 2), 2
    replicas = []
    powers = [sum(attends[r] for members in groups for r in members) for groups in grouped]
    sequences = proportional(rng.choice((0, 0, 2, 5)) if len(grouped) == 1 else rng.randint(0, 6), powers, 1)
    for groups, batch in zip(grouped, sequences, strict=True):
        slots = proportional(total - len(groups), [sum(attends[r] for r in members) for members in groups], 1)
        sizes = group_tokens(seq_len, slot, slots)
        laid = []
        for members, n, size in zip(groups, slots, sizes, strict=True):
            tokens = proportional(size, [speed[r] for r in members])
            heads = proportional(model.heads, [attends[r] for r in members])
            laid.append((n, list(zip(members, tokens, heads, strict=True))))
        replicas.append([batch, laid])
    choices = dict(
        fusion=rng.choice((1, 2, 4, 8)), exchange=rng.choice(("ring", "allgather")),
        recompute=rng.choice(("none", "selective", "full")), dtype=rng.choice(("float32", "bfloat16")),
    )  # fmt: skip
    choices["offload"] = draw_offload(seed, choices["recompute"])
    layout = Layout(places, model, seq_len, slot, replicas, choices)
    work = workload_of(layout.plan(), model, accumulation=rng.choice((1, 1, 3)), keep_parameters=rng.random() < 0.5)
    return cluster, layout, work
