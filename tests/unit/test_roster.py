"""The job's ranks against the cluster's devices: matched whatever their order, refused with a table, or planned for."""

from __future__ import annotations

from collections import Counter

import pytest

from hexiseq import launch
from hexiseq.cluster import Cluster, Link, Node, Seat
from hexiseq.launch import Member, Roster
from recipes.compose import composed

H100, A100 = "NVIDIA H100 80GB HBM3 GPU-1", "NVIDIA A100-SXM4-80GB GPU-2"


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    """4 H100 in one node, 4 A100 in another, and a link between them."""
    given = Cluster.from_config(composed(["+cluster=h100_a100"])["cluster"])
    return Cluster(given.name, given.nodes, (Link(("h100", "a100"), 12.5),))


def present(cluster: Cluster, *nodes: tuple[str, str, int], gres: bool = False) -> Roster:
    members = [
        Member(node, "p", gres=device) if gres else Member(node, "p", device)
        for node, device, count in nodes
        for _ in range(count)
    ]
    return launch.roster(members, cluster, {})


@pytest.mark.parametrize("gres", [False, True])
def test_devices_are_found_whatever_the_order_of_nodes(cluster: Cluster, gres: bool) -> None:
    h100, a100 = ("h100", "a100") if gres else (H100, A100)
    roster = present(cluster, ("x", a100, 4), ("y", h100, 4), gres=gres)
    assert roster.types == ("a100_80",) * 4 + ("h100_sxm",) * 4
    assert launch.reconcile(cluster, roster, "refuse") == (cluster, None)
    assert roster.table().splitlines()[1:] == [
        "0-3   x     a100_80   p", "4-7   y     h100_sxm  p",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((("x", H100, 4), ("y", A100, 3)), "7 ranks are not the 8 devices"),
        ((("x", H100, 4), ("y", A100, 5)), "9 ranks are not the 8 devices"),
        ((("x", H100, 8),), "8 ranks are not the 8 devices"),
        ((("x", H100, 4), ("y", A100, 2), ("z", A100, 2)), "8 ranks are not the 8 devices"),
    ],
)
def test_other_devices_are_refused_with_a_table(
    cluster: Cluster, nodes: tuple[tuple[str, str, int], ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        launch.reconcile(cluster, present(cluster, *nodes), "refuse")
    said = str(caught.value)
    assert "rank  node  device" in said
    assert "nodes with" in said
    assert "launch.mismatch=replan" in said


def test_a_device_the_cluster_does_not_know_is_refused_by_name_even_when_replanning(cluster: Cluster) -> None:
    roster = present(cluster, ("x", H100, 4), ("y", "NVIDIA L40S GPU-3", 4))
    with pytest.raises(ValueError, match=r"cluster 'h100_a100' has no NVIDIA L40S GPU-3: add it"):
        launch.reconcile(cluster, roster, "replan")
    roster = present(cluster, ("x", "h100", 4), ("y", "l40s", 4), gres=True)
    with pytest.raises(ValueError, match=r"has no l40s: add it .* slurm\.gres\.TYPE=NAME"):
        launch.reconcile(cluster, roster, "replan")


def test_what_is_there_is_planned_for(cluster: Cluster) -> None:
    roster = present(cluster, ("x", A100, 2), ("y", H100, 4), ("z", A100, 4), ("w", A100, 2))
    found, warning = launch.reconcile(cluster, roster, "replan")
    assert warning is not None
    assert "12 ranks are not the 8 devices" in warning
    assert Counter(place.device.type for place in found.places) == {"h100_sxm": 4, "a100_80": 8}
    assert sorted((node.count, len(node.seats)) for node in found.nodes) == [(1, 4), (1, 4), (2, 2)]
    bandwidth = {node.name: node.intra_gb_per_s for node in found.nodes}
    assert sorted(bandwidth.values()) == [300, 300, 450]
    a, b = (next(p for p in found.places if p.device.type == kind) for kind in ("h100_sxm", "a100_80"))
    assert found.bandwidth_gb_per_s(a, b) == 12.5  # the link of the classes they are like
    assert launch.reconcile(found, roster, "refuse") == (found, None)


def test_ranks_of_unknown_type_are_only_counted(cluster: Cluster) -> None:
    unknown = launch.roster([Member("x")] * 8, cluster, {})
    assert launch.reconcile(cluster, unknown, "replan") == (cluster, None)
    with pytest.raises(ValueError, match="7 ranks are not the 8 devices"):
        launch.reconcile(cluster, launch.roster([Member("x")] * 7, cluster, {}), "replan")


def test_what_the_site_calls_a_device(cluster: Cluster) -> None:
    both = Cluster("both", (*cluster.nodes, Node("small", (Seat(cluster.devices[1].__class__(
        **{**cluster.devices[1].__dict__, "type": "a100_40"})),), 300, 1, 25)))  # fmt: skip
    assert launch.roster([Member("x", gres="a100")], both, {}).types == (None,)  # which of the two cannot be said
    assert launch.roster([Member("x", gres="small")], both, {"a100_40": "small"}).types == ("a100_40",)
    assert launch.roster([Member("x", gres="a100")], both, {"a100_40": "small"}).types == ("a100_80",)


def test_long_tables_are_cut(cluster: Cluster) -> None:
    members = [Member(f"n{i}", "p", A100) for i in range(60)]
    lines = launch.roster(members, cluster, {}).table().splitlines()
    assert len(lines) == 42
    assert "20 more" in lines[-1]
