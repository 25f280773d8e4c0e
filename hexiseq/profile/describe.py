"""From what all ranks measured to a cluster a plan can be made for, and to words about it. Pure Python."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hexiseq.cluster import Cluster, Device
from hexiseq.doctor import recognise
from hexiseq.plan import align

NOTABLE = 0.15  # difference from the catalogue worth a line
CROWDED = 0.1  # part of a device's memory, or of a core, that others use
RATES = ("gemm_tflops", "attention_forward_tflops", "attention_backward_tflops")
COMPARED = {
    **{name: "TFLOP/s" for name in RATES}, "hbm_gb_per_s": "GB/s", "host_gb_per_s": "GB/s", "memory_gb": "GB",
}  # fmt: skip
MOST_LAUNCH = 0.98  # of the shortest attention call, so that something is left for its work
CPU_OVERHEAD_GB, GPU_OVERHEAD_GB = 0.4, 2.0  # context and communicators; not measured


@dataclass(frozen=True)
class Survey:
    """A described job.

    Attributes:
        cluster: in the form `Cluster.from_config` takes.
        types: device type of each rank.
        lines: a table of ranks, one of links, then what is worth attention.
        rates: of each rank, as fields of `Device`.
        links: fitted, one for each set of ranks.
    """

    cluster: dict[str, Any]
    types: list[str]
    lines: list[str]
    rates: list[dict[str, float]]
    links: list[dict[str, Any]]


def describe(
    name: str, ranks: Sequence[Mapping[str, Any]], catalogue: Mapping[str, Device], given: Cluster | None, alike: float
) -> Survey:
    """What all ranks found, as a cluster.

    Args:
        name: of the cluster.
        ranks: by rank, what `measured` and `measure_links` returned, and ``node``, ``host``, ``device`` (what the
            driver calls it, `doctor.driver_name`), ``dtypes``, ``vendor``, and ``cores`` it is pinned to.
        catalogue: known device types, found by the driver's names.
        given: the cluster the ranks were started as, whose places are theirs, rank by rank; or, of GPUs, whose device
            types are.
        alike: ranks of one device whose rates agree to this fraction are of one type.
    """
    shares = cpu_shares(ranks)
    rates = [device_rates(entry["calls"], share) for entry, share in zip(ranks, shares, strict=True)]
    names = {device.type: device.names for device in given.devices} if given else {}
    if given is not None and all(device.vendor == "cpu" for device in given.devices):
        kinds = [place.device.type for place in given.places]
    else:
        kinds = [_kind(entry, names, catalogue) for entry in ranks]
    known = {**catalogue, **({device.type: device for device in given.devices} if given else {})}
    memory = _memory_gb(ranks, kinds, known)
    types = _types(kinds, rates, alike)
    links = _fitted(ranks)
    gpus = {
        kind: _entry(kind, [i for i, other in enumerate(types) if other == kind], ranks, kinds, rates, memory, known)
        for kind in dict.fromkeys(types)
    }
    nodes = _nodes(ranks, types, links, given)
    cluster = {"name": name, "gpus": gpus, "nodes": nodes, "links": _special_links(nodes, links, ranks)}
    lines = [*_rank_table(ranks, types, rates, shares), *_link_table(links, ranks)]
    lines += [*_sick(ranks, kinds, types, rates), *_crowded(ranks), *_differences(kinds, rates, memory, known)]
    if given is not None:
        lines += _link_differences(nodes, given)
    return Survey(cluster, types, lines, rates, links)


def fit(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """``seconds = fixed + amount / rate``, by least squares of the relative errors, so that small calls decide what is
    fixed and large ones the rate.

    Returns:
        fixed seconds, at least 0, and the rate in amounts a second.
    """
    fixed, rates = fit_kinds(amounts, seconds, [None] * len(amounts))
    return fixed, rates[None]


def fit_kinds(
    amounts: Sequence[float], seconds: Sequence[float], kinds: Sequence[Hashable], most_fixed: float = 0.9999
) -> tuple[float, dict[Hashable, float]]:
    """The same with one fixed cost of all calls, no more than a part of the shortest, and a rate for each kind."""
    assert len(amounts) == len(seconds) == len(kinds) > 0
    # Weighted by 1 / seconds^2: minimise the sum of (fixed * u + slope * x - 1)^2, slopes given `fixed` first.
    u = np.array([1 / s for s in seconds])
    x = np.array([a / s for a, s in zip(amounts, seconds, strict=True)])
    rows = {kind: np.array([other == kind for other in kinds]) for kind in dict.fromkeys(kinds)}
    free, left = u.copy(), np.ones(len(x))  # what no slope makes up for
    for row in rows.values():
        along = x[row] / (x[row] @ x[row])
        free[row] -= x[row] * (along @ u[row])
        left[row] -= x[row] * along.sum()
    fixed = 0.0
    if free @ free > 1e-12 * (u @ u):
        fixed = min(max(0.0, float(free @ left / (free @ free))), most_fixed * min(seconds))
    return fixed, {kind: float(x[row] @ x[row] / (x[row] @ (1 - fixed * u[row]))) for kind, row in rows.items()}


def cpu_shares(ranks: Sequence[Mapping[str, Any]]) -> list[float]:
    """The part of the cores it has threads for that each rank got from the job's other ranks; 1 on a GPU.

    Ranks on the same cores of a host divide what is left when other programs have had theirs: those come and go, and a
    plan that counts them in is wrong as soon as they do.
    """
    shares = [1.0] * len(ranks)
    for members in _core_sharers(ranks):
        usages = [ranks[i]["usage"] for i in members]
        cores = {core for usage in usages for core in usage["cores"]}
        busy = sum(usage["busy"] for usage in usages)
        offered = len(cores) * max(usage["wall"] for usage in usages)
        # The widest view is that of all the cores together.
        views = [usage["cores_busy"] for usage in usages if set(usage["cores"]) == cores]
        others = max(0.0, max(views) - busy) if views and None not in views else 0.0
        available = max(offered - others, busy)
        for i, usage in zip(members, usages, strict=True):
            share = usage["busy"] / available * len(cores) / usage["threads"]
            most = 1.0 if usage["quota"] is None else usage["quota"] / usage["threads"]
            shares[i] = min(share, most, 1.0)
    return shares


def _core_sharers(ranks: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """CPU ranks that share cores, directly or through others."""
    groups: list[tuple[str, set[int], list[int]]] = []
    for i, entry in enumerate(ranks):
        if entry["usage"] is None:
            continue
        host, cores, members = entry["host"], set(entry["usage"]["cores"]), [i]
        for group in [g for g in groups if g[0] == host and g[1] & cores]:
            groups.remove(group)
            cores |= group[1]
            members += group[2]
        groups.append((host, cores, sorted(members)))
    return [members for _, _, members in groups]


def device_rates(calls: Sequence[Mapping[str, Any]], share: float) -> dict[str, float]:
    """Fields of `Device` from a rank's calls, on its share of the hardware.

    Matrix products count as often as the model does them. Attention's rates are those of its largest full tiles; what
    it reaches in others is for `device_curves`.
    """
    of = {work: [call for call in calls if call["work"] == work] for work in
          ("gemm", "attention_forward", "attention_backward", "copy", "to_host", "from_host")}  # fmt: skip
    flops, seconds = (sum(call["per_token"] * call[key] for call in of["gemm"]) for key in ("amount", "seconds"))
    found = {"gemm_tflops": share * flops / seconds / 1e12}
    fixed = []
    for work in ("attention_forward", "attention_backward"):
        cost, full, _ = _attention_rates(of[work])
        found[f"{work}_tflops"] = share * full[-1] / 1e12
        fixed.append(cost / share)
    (copy,) = of["copy"]
    found["hbm_gb_per_s"] = share * copy["amount"] / copy["seconds"] / 1e9
    found["launch_us"] = sum(fixed) / len(fixed) * 1e6
    if hosted := of["to_host"] + of["from_host"]:
        found["host_gb_per_s"] = min(call["amount"] / call["seconds"] for call in hosted) / 1e9
    return found


def device_curves(calls: Sequence[Mapping[str, Any]]) -> dict[str, list[list[float]]]:
    """The curves of `Device` from a rank's attention calls: of both passes together, their geometric mean."""
    passes = [
        _attention_rates([call for call in calls if call["work"] == work])
        for work in ("attention_forward", "attention_backward")
    ]
    found: dict[str, list[list[float]]] = {}
    for name, causal in (("attention_curve", False), ("causal_curve", True)):
        edges = sorted({call["edge"] for call in calls if call["edge"] and call["causal"] == causal})
        reached = [[rate / full[-1] for rate in (squares if causal else full)] for _, full, squares in passes]
        fractions = [min(1.0, math.sqrt(forward * backward)) for forward, backward in zip(*reached, strict=True)]
        found[name] = [[edge, round_to(fraction, 3)] for edge, fraction in zip(edges, fractions, strict=True)]
    return found


def _attention_rates(calls: Sequence[Mapping[str, Any]]) -> tuple[float, list[float], list[float]]:
    """Seconds that any call costs, and FLOPs a second without them by edge: of full tiles, of causal squares.

    A larger tile is never the slower one: where it was, both have the rate between.
    """
    kinds = [(call["causal"], call["edge"]) for call in calls]
    amounts, seconds = ([call[key] for call in calls] for key in ("amount", "seconds"))
    fixed, rates = fit_kinds(amounts, seconds, kinds, MOST_LAUNCH)
    full, squares = (_rising([rates[kind] for kind in sorted(set(kinds)) if kind[0] == causal])
                     for causal in (False, True))  # fmt: skip
    return fixed, full, squares


def _rising(values: Sequence[float]) -> list[float]:
    """The nearest sequence that does not fall: neighbours that do are given their geometric mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and statistics.geometric_mean(pools[-2]) > statistics.geometric_mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [statistics.geometric_mean(pool) for pool in pools for _ in pool]


def _kind(entry: Mapping[str, Any], names: Mapping[str, Any], catalogue: Mapping[str, Device]) -> str:
    """The device type by the driver's name: of the given cluster, of the catalogue, else made from the name."""
    if entry["vendor"] == "cpu":
        return "cpu"
    known = {kind: device.names for kind, device in catalogue.items()}
    found = recognise(entry["device"], names) or recognise(entry["device"], known)
    words = [word for word in _model_name(entry["device"]).lower().split() if word not in ("nvidia", "amd", "instinct")]
    return found or "".join(c if c.isalnum() else "_" for c in "_".join(words))


def _model_name(device: str) -> str:
    return device.split(" GPU-")[0]


def _types(kinds: Sequence[str], rates: Sequence[Mapping[str, float]], alike: float) -> list[str]:
    """Ranks of a kind whose rates agree share its type; the slower ones get types of their own."""
    types = [""] * len(kinds)
    for kind in dict.fromkeys(kinds):
        left = sorted((i for i, other in enumerate(kinds) if other == kind), key=lambda i: (-_speed(rates[i]), i))
        for number in itertools.count():
            if not left:
                break
            leader = rates[left[0]]
            close = [i for i in left if all(abs(rates[i][name] / leader[name] - 1) <= alike for name in RATES)]
            for i in close:
                types[i] = kind if number == 0 else f"{kind}_slow" if number == 1 else f"{kind}_slow{number}"
            left = [i for i in left if i not in close]
    return types


def _speed(rates: Mapping[str, float]) -> float:
    return math.prod(rates[name] for name in RATES) ** (1 / len(RATES))


def _memory_gb(ranks: Sequence[Mapping[str, Any]], kinds: Sequence[str], known: Mapping[str, Device]) -> list[float]:
    """Of each rank: its device's; on CPUs its part of the host's, and no more than its type is given."""
    found = []
    for entry, kind in zip(ranks, kinds, strict=True):
        gb = entry["memory_gb"]
        if entry["vendor"] == "cpu":
            gb /= sum(other["host"] == entry["host"] for other in ranks)
            gb = min(gb, known[kind].memory_gb) if kind in known else gb
        found.append(gb)
    return found


def _entry(
    kind: str, members: Sequence[int], ranks: Sequence[Mapping[str, Any]], kinds: Sequence[str],
    rates: Sequence[Mapping[str, float]], memory: Sequence[float], known: Mapping[str, Device],
) -> dict[str, Any]:  # fmt: skip
    """The catalogue entry of a type of ranks."""
    first, base = ranks[members[0]], known.get(kinds[members[0]])
    measured = {key: round_to(statistics.median(rates[i][key] for i in members)) for key in rates[members[0]]}
    on_cpu = first["vendor"] == "cpu"
    model = _model_name(first["device"])
    # A type of its own beside others of its name is told from them by which devices they are.
    names = [model] if kind == kinds[members[0]] else [ranks[i]["device"].removeprefix(model).strip() for i in members]
    return {
        "type": kind,
        "vendor": first["vendor"],
        "names": [] if on_cpu else [name for name in names if name],
        "peak_tflops": max(base.peak_tflops if base else 0.0, measured["gemm_tflops"]),
        **measured,
        **_median_curves([device_curves(ranks[i]["calls"]) for i in members]),
        "memory_gb": round_to(min(memory[i] for i in members)),
        "overhead_gb": base.overhead_gb if base else CPU_OVERHEAD_GB if on_cpu else GPU_OVERHEAD_GB,
        "dtypes": list(base.dtypes if base else first["dtypes"]),
        "kernel": first["kernel"],
        "source": f"measured by recipe=profile on {first['host']}"
        + ("" if on_cpu else f", {model}")
        + f", {first['workload']}",
    }


def _median_curves(curves: Sequence[Mapping[str, list[list[float]]]]) -> dict[str, list[list[float]]]:
    """The curves of one type of ranks, all measured at the same edges."""
    found = {}
    for name, first in curves[0].items():
        fractions = [statistics.median(curve[name][i][1] for curve in curves) for i in range(len(first))]
        found[name] = [[edge, fraction] for (edge, _), fraction in zip(first, fractions, strict=True)]
    return found


def _fitted(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every measured link once: fixed cost and bandwidth per direction and rank, from its slowest end."""
    ends: dict[tuple, list[Mapping[str, Any]]] = {}
    for entry in ranks:
        for link in entry["links"]:
            ends.setdefault((link["kind"], link["reach"], tuple(link["ranks"])), []).append(link)
    found = []
    for (kind, reach, members), sides in sorted(ends.items()):
        seconds = [max(side["seconds"][i] for side in sides) for i in range(len(sides[0]["seconds"]))]
        sizes = sides[0]["bytes"]
        fixed, rate = fit(sizes, seconds)
        # Short transfers may pass at once what a link lets through only now and then.
        rate = min(rate, sizes[-1] / max(seconds[-1] - fixed, 1e-9))
        found.append({"kind": kind, "reach": reach, "ranks": list(members), "latency_us": fixed * 1e6,
                      "gb_per_s": rate / 1e9})  # fmt: skip
    return found


def _nodes(
    ranks: Sequence[Mapping[str, Any]], types: Sequence[str], links: Sequence[Mapping[str, Any]], given: Cluster | None
) -> list[dict[str, Any]]:
    """Nodes as configurations have them; those alike are one with a count."""
    order = list(dict.fromkeys(entry["node"] for entry in ranks))
    members = {node: [i for i, entry in enumerate(ranks) if entry["node"] == node] for node in order}
    nics = {place.node_name: place.node_class.nics for place in given.places} if given else {}
    all_within = [link["gb_per_s"] for link in links if link["reach"] == "within"]
    nodes: list[dict[str, Any]] = []
    for node in order:
        within = {
            kind: [link["gb_per_s"] for link in links
                   if link["kind"] == kind and link["reach"] == "within" and set(link["ranks"]) <= set(members[node])]
            for kind in ("p2p", "all_to_all")
        }  # fmt: skip
        network = _network(members[node], links)
        # What there is when all use it; a rank alone on its node has nobody to exchange with there.
        medians = [statistics.median(rates) for rates in within.values() if rates]
        intra = min(medians) if medians else max([network or 0.0, *all_within]) or 1.0
        seats = [_seat(ranks[i], types[i]) for i in members[node]]
        count = nics.get(node, 1)
        hosts = [ranks[i]["host_memory_gb"] for i in members[node]]
        nodes.append({
            "name": node, "devices": _counted(seats), "intra_gb_per_s": round_to(intra), "nics": count,
            "nic_gb_per_s": round_to((network or intra) / count),
            **({"host_memory_gb": round_to(min(hosts))} if None not in hosts else {}),
        })  # fmt: skip
    return _merged(nodes)


def _network(members: Sequence[int], links: Sequence[Mapping[str, Any]]) -> float | None:
    """Bandwidth of a node to others: of all its ranks together, or what one alone reaches."""
    own = [link for link in links if link["reach"] == "between" and set(link["ranks"]) & set(members)]
    together = sum(link["gb_per_s"] for link in own if link["kind"] == "all_to_all")
    alone = max((link["gb_per_s"] for link in own if link["kind"] == "p2p"), default=0.0)
    return max(together, alone) or None


def _seat(entry: Mapping[str, Any], kind: str) -> dict[str, Any]:
    seat: dict[str, Any] = {"type": kind}
    if entry["cores"]:
        seat["cores"] = list(entry["cores"])
    if entry["usage"] and entry["usage"]["quota"] is not None:
        seat["quota"] = entry["usage"]["quota"]
    return seat


def _counted(seats: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours alike written once."""
    return [{**seat, "count": n} if (n := len(list(same))) > 1 else seat for seat, same in itertools.groupby(seats)]


def _merged(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Nodes of the same unpinned devices whose links agree are one class: plans are made by class, not by node."""
    classes: list[list[dict[str, Any]]] = []
    for node in nodes:
        for members in classes:
            first = members[0]
            close = all(abs(node[key] / first[key] - 1) <= NOTABLE for key in ("intra_gb_per_s", "nic_gb_per_s"))
            unpinned = not any("cores" in seat for seat in node["devices"])
            if close and unpinned and node["devices"] == first["devices"] and node["nics"] == first["nics"]:
                members.append(node)
                break
        else:
            classes.append([node])
    found = []
    for members in classes:
        if len(members) == 1:
            found.append(members[0])
            continue
        medians = {key: statistics.median(node[key] for node in members) for key in ("intra_gb_per_s", "nic_gb_per_s")}
        if "host_memory_gb" in members[0]:
            medians["host_memory_gb"] = min(node["host_memory_gb"] for node in members)
        found.append({**members[0], **medians, "name": f"{members[0]['name']}-and-alike", "count": len(members)})
    return found


def _special_links(
    nodes: Sequence[Mapping[str, Any]], links: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Pairs of nodes that carry clearly less than the others do."""
    pairs = [link for link in links if link["kind"] == "p2p" and link["reach"] == "between"]
    alone = {node["name"] for node in nodes if "count" not in node}
    usual = statistics.median(link["gb_per_s"] for link in pairs) if pairs else 0.0
    found = []
    for link in pairs:
        ends = [ranks[rank]["node"] for rank in link["ranks"]]
        if link["gb_per_s"] < (1 - NOTABLE) * usual and set(ends) <= alone:
            found.append({"nodes": ends, "gb_per_s": round_to(link["gb_per_s"])})
    return found


def _rank_table(
    ranks: Sequence[Mapping[str, Any]], types: Sequence[str], rates: Sequence[Mapping[str, float]],
    shares: Sequence[float],
) -> list[str]:  # fmt: skip
    header = ["rank", "node", "device", "type", "gemm", "attn fwd", "attn bwd", "copy", "launch", "memory", "free",
              "share", "kernel"]  # fmt: skip
    rows = []
    for i, (entry, kind, rate, share) in enumerate(zip(ranks, types, rates, shares, strict=True)):
        rows.append([
            str(i), entry["node"], _model_name(entry["device"]), kind, *(f"{rate[name]:.3g}" for name in RATES),
            f"{rate['hbm_gb_per_s']:.3g}", f"{rate['launch_us']:.3g}", f"{entry['memory_gb']:.3g}",
            f"{entry['free_gb']:.3g}", f"{share:.0%}", entry["kernel"],
        ])  # fmt: skip
    return ["rates in TFLOP/s, copy in GB/s, launch in us, memory in GB:", *align(header, rows)]


def _link_table(links: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each class of link; the slowest of a class is named."""
    if not links:
        return ["one rank: no links"]
    rows = []
    for reach, kind in dict.fromkeys((link["reach"], link["kind"]) for link in links):
        alike = [link for link in links if (link["reach"], link["kind"]) == (reach, kind)]
        slowest = min(alike, key=lambda link: link["gb_per_s"])
        rows.append([
            f"{reach} nodes" if reach == "between" else "within a node", kind.replace("_", "-"), str(len(alike)),
            f"{statistics.median(link['gb_per_s'] for link in alike):.3g}",
            f"{statistics.median(link['latency_us'] for link in alike):.3g}",
            f"{slowest['gb_per_s']:.3g}", "ranks " + ", ".join(map(str, slowest["ranks"])),
        ])  # fmt: skip
    header = ["links", "kind", "measured", "GB/s", "latency us", "slowest", "between"]
    return ["bandwidth per rank and direction:", *align(header, rows)]


def _sick(
    ranks: Sequence[Mapping[str, Any]], kinds: Sequence[str], types: Sequence[str],
    rates: Sequence[Mapping[str, float]],
) -> list[str]:  # fmt: skip
    """Ranks slower than others of their kind, with what they lack."""
    lines = []
    for i, (kind, own) in enumerate(zip(kinds, types, strict=True)):
        if own == kind:
            continue
        well = [rates[j] for j, other in enumerate(types) if other == kind]
        behind = {name: rates[i][name] / statistics.median(rate[name] for rate in well) - 1 for name in RATES}
        worst = min(behind, key=lambda name: behind[name])
        lines.append(
            f"SLOW: rank {i} ({ranks[i]['device']} on {ranks[i]['node']}) is not as fast as other {kind}: "
            f"{_words(worst)} {behind[worst]:+.0%}; it is planned for as {own}"
        )
    return lines


def _crowded(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for i, entry in enumerate(ranks):
        if entry["vendor"] != "cpu" and entry["free_gb"] < (1 - CROWDED) * entry["memory_gb"]:
            lines.append(f"IN USE: rank {i} ({entry['device']} on {entry['node']}): other programs hold "
                         f"{entry['memory_gb'] - entry['free_gb']:.1f} of {entry['memory_gb']:.1f} GB")  # fmt: skip
    for members in _core_sharers(ranks):
        usages = [ranks[i]["usage"] for i in members]
        cores = {core for usage in usages for core in usage["cores"]}
        views = [usage["cores_busy"] for usage in usages if set(usage["cores"]) == cores]
        if not views or None in views:
            continue
        others = (max(views) - sum(usage["busy"] for usage in usages)) / len(cores)
        if others > CROWDED * (wall := max(usage["wall"] for usage in usages)):
            lines.append(
                f"IN USE: other programs had {others / wall:.0%} of core {', '.join(map(str, sorted(cores)))} "
                f"(rank {', '.join(map(str, members))}) meanwhile; rates are those without them"
            )
    return lines


def _differences(
    kinds: Sequence[str], rates: Sequence[Mapping[str, float]], memory: Sequence[float], known: Mapping[str, Device]
) -> list[str]:
    """What is not as catalogued, ranks of a kind together."""
    lines = []
    for kind in dict.fromkeys(kinds):
        members = [i for i, other in enumerate(kinds) if other == kind]
        if kind not in known:
            lines.append(f"{kind} is not in the catalogue: measured only")
            continue
        for name, unit in COMPARED.items():
            expected = getattr(known[kind], name)
            if expected is None or (name == "host_gb_per_s" and not all(name in rates[i] for i in members)):
                continue
            values = {i: memory[i] if name == "memory_gb" else rates[i][name] for i in members}
            odd = {i: value for i, value in values.items() if abs(value / expected - 1) > NOTABLE}
            if odd:
                typical = statistics.median(odd.values())
                lines.append(
                    f"DIFFERS: {kind} {_words(name)} {typical:.3g} {unit} instead of the catalogue's {expected:.3g} "
                    f"({typical / expected - 1:+.0%}) on rank {', '.join(map(str, odd))}"
                )
    return lines


def _link_differences(nodes: Sequence[Mapping[str, Any]], given: Cluster) -> list[str]:
    lines = []
    expected = {node.name: node for node in given.nodes} | {place.node_name: place.node_class for place in given.places}
    for node in nodes:
        there = expected.get(node["name"])
        if there is None:
            continue
        pairs = [("within", node["intra_gb_per_s"], there.intra_gb_per_s)]
        if len(nodes) > 1:
            pairs.append(("to other nodes", node["nics"] * node["nic_gb_per_s"], there.network_gb_per_s))
        for words, found, wanted in pairs:
            if abs(found / wanted - 1) > NOTABLE:
                lines.append(f"DIFFERS: node {node['name']} {words} {found:.3g} GB/s instead of the cluster's "
                             f"{wanted:.3g} ({found / wanted - 1:+.0%})")  # fmt: skip
    return lines


def _words(name: str) -> str:
    for unit in ("_tflops", "_gb_per_s", "_gb"):
        name = name.removesuffix(unit)
    return {"hbm": "memory bandwidth", "host": "copies to host memory"}.get(name, name.replace("_", " "))


def round_to(value: float, digits: int = 4) -> float:
    """As many digits as a measurement has."""
    return float(f"{value:.{digits}g}")
