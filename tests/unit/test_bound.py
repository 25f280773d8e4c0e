"""The lower bound: no plan that fits is below it, however the plan was made and however little memory there is."""

import dataclasses
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hexiseq.cluster import Cluster, Node, Seat
from hexiseq.cost import MEMORY_FRACTION, OutOfMemory, check_memory, lower_bound, predict
from hexiseq.schedule import IllegalPolicy, solve
from hexiseq.workload import ModelShape, Workload

from .plans import (
    between,
    draw_large,
    draw_links,
    draw_nodes,
    draw_offload,
    make_device,
    plan_over,
    with_hosts,
    with_memory,
    workload_of,
)  # fmt: skip

NEVER_BELOW = 1 - 1e-9


def squeezed(cluster, plan, predicted, kinds=None):
    """The cluster with just the memory that the plan takes, on devices of these types (or all)."""
    need = {}
    for device, used in zip(plan.devices, predicted.memory_gb, strict=True):
        if kinds is None or device.type in kinds:
            need[device.type] = max(need.get(device.type, 0.0), used)
    return with_memory(cluster, {kind: used / MEMORY_FRACTION * (1 + 1e-12) for kind, used in need.items()})


def over_bound(cluster, layout, work):
    """Predicted step over the bound: with memory without end, with no more than the plan takes on any type of device,
    and with no more on one of them."""
    plan = layout.plan()
    predicted = predict(plan, cluster, work)
    tight = [squeezed(cluster, plan, predicted)]
    tight += [squeezed(cluster, plan, predicted, {device.type}) for device in cluster.devices]
    return [predicted.step_seconds / lower_bound(each, work) for each in (cluster, *tight)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1_000_000))
def test_no_plan_is_below_the_bound(seed):
    assert min(over_bound(*draw_large(seed))) >= NEVER_BELOW


def test_no_fixed_plan_is_below_the_bound_and_some_are_near():
    """Were none near, any bound that is low enough would pass."""
    ratios = [over_bound(*draw_large(seed)) for seed in range(150)]
    assert min(map(min, ratios)) >= NEVER_BELOW
    assert sum(free < 1.05 for free, *_ in ratios) >= 5
    assert sum(min(tight) < 1.05 for _, *tight in ratios) >= 5
    # Memory alone makes a difference in some.
    assert sum(min(tight) < 0.9 * free for free, *tight in ratios) >= 5


@settings(max_examples=100, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1_000_000))
def test_no_plan_is_below_the_bound_with_any_memory(seed):
    """Of devices that the plan leaves out as well."""
    cluster, layout, work = draw_large(seed)
    rng = random.Random(seed)
    some = with_memory(cluster, {device.type: between(rng, 1.0, 200.0) for device in cluster.devices})
    predicted = predict(layout.plan(), some, work)
    if all(u <= m for u, m in zip(predicted.memory_gb, predicted.memory_limit_gb, strict=True)):
        assert predicted.step_seconds >= lower_bound(some, work) * NEVER_BELOW


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_pushed_below_the_bound(seed):
    """Small changes, kept where they bring the plan nearer to a bound."""
    cluster, layout, work = draw_large(seed)
    rng, best = random.Random(seed), min(over_bound(cluster, layout, work))
    for _ in range(25):
        changed = layout.changed(rng)
        if (found := min(over_bound(cluster, changed, work))) < best:
            best, layout = found, changed
    assert best >= NEVER_BELOW


def test_attention_of_a_group_of_one_takes_no_more_memory_than_it_does():
    """In 32 bits it adds to its kernel's own result, so that a narrow MLP is all that a layer takes beside it."""
    devices = [make_device("fast", 800, 600, 560), make_device("slow", 50, 40, 35)]
    cluster = Cluster("c", (Node("n", tuple(map(Seat, devices)), 300.0, 1, 25.0),))
    model = ModelShape("m", 2, 512, 64, 16, 16, 128, 1000)
    plan = plan_over(cluster.places[:1], [(1, [(4, [(0, 16384, 16)])])], model, 16384, 4096)
    work, predicted = workload_of(plan, model), predict(plan, cluster, workload_of(plan, model))
    tight = squeezed(cluster, plan, predicted)
    assert predicted.step_seconds >= lower_bound(tight, work) * NEVER_BELOW


def draw_job(seed):
    """A cluster with some memory and a job that may or may not fit it."""
    rng = random.Random(seed)
    devices = [
        make_device(
            f"d{i}",
            gemm,
            gemm * rng.uniform(0.4, 0.9),
            gemm * rng.uniform(0.4, 0.8),
            between(rng, 5, 80),
            host_gb_per_s=between(random.Random(f"host {seed} {i}"), 2, 60),
        )
        for i, gemm in enumerate(between(rng, 50, 900) for _ in range(rng.randint(1, 4)))
    ]
    nodes = draw_nodes(rng, devices, (30, 500), (0.2, 100), most_nodes=3, most_seats=3)
    cluster = Cluster("drawn", nodes, draw_links(rng, nodes, (0.2, 100)) if rng.random() < 0.3 else ())
    heads = rng.choice(((8, 8), (12, 4), (16, 2), (9, 3)))
    model = ModelShape("m", rng.randint(2, 6), 1024, rng.choice((512, 4096)), *heads, 128, 32000)
    work = Workload(
        model, int(between(rng, 2000, 100_000)), rng.choice(("bfloat16", "float32")),
        rng.choice(("none", "selective", "full")), rng.choice((1, 1, 2, 5)), rng.choice((1, 2)), rng.random() < 0.5,
    )  # fmt: skip
    hosts = random.Random(f"hosts {seed}")
    cluster = with_hosts(cluster, lambda node: len(node.seats) * between(hosts, 1, 20))
    return cluster, dataclasses.replace(work, offload=draw_offload(seed, work.recompute))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1_000_000))
def test_no_plan_of_the_scheduler_is_below_the_bound(seed):
    cluster, work = draw_job(seed)
    try:
        plan = solve(cluster, work, rivals=False, time_limit_seconds=600)
    except (OutOfMemory, IllegalPolicy):
        assume(False)
    check_memory(plan, cluster, work)
    bound = lower_bound(cluster, work)
    assert plan.bound.step_seconds == bound
    assert plan.predicted.step_seconds >= bound * NEVER_BELOW
    assert plan.gap == pytest.approx(plan.predicted.step_seconds / bound - 1)
    # With no more memory than this plan takes, it is still a plan.
    for kinds in (None, *({device.type} for device in cluster.devices)):
        tight = squeezed(cluster, plan, plan.predicted, kinds)
        assert plan.predicted.step_seconds >= lower_bound(tight, work) * NEVER_BELOW
