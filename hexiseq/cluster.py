"""The cluster: device types with achieved rates, nodes written as class x count, and the links between them.

Units are in the names: ``_tflops`` 1e12 floating-point operations a second, ``_gb`` 1e9 bytes, ``_gb_per_s`` 1e9
bytes a second per direction. Rates are *achieved*, not datasheet, except `Device.peak_tflops`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hexiseq.plan import DTYPES, KERNELS

CPU_KERNELS = ("cpu", "dense", "auto")
VENDORS = ("nvidia", "amd", "cpu")
LEAST, MOST = 1e-9, 1e15  # of any rate or size; beyond them times would be zero or infinite
Curve = tuple[tuple[float, float], ...]  # (edge of a tile in tokens, fraction of the rate)
LEAST_QUOTA = 0.05  # of a core: a kernel hands out no less than 1 ms at a time


@dataclass(frozen=True)
class Device:
    """A device type.

    Attributes:
        type: name in the catalogue, such as ``h100_sxm``.
        vendor: one of `VENDORS`.
        names: what the driver calls it, in whole words, to recognise it at run time.
        peak_tflops: dense datasheet peak in 16-bit (for MFU only).
        gemm_tflops: achieved matrix multiplication.
        attention_forward_tflops, attention_backward_tflops: achieved by `kernel` on large tiles.
        memory_gb, hbm_gb_per_s: device memory and its bandwidth.
        overhead_gb: memory that no tensor can use: context, communicators.
        launch_us: fixed cost of one kernel call.
        dtypes: compute types it can run.
        kernel: attention kernel, one of `KERNELS`.
        source: where the rates come from.
        attention_curve: fractions of the attention rates, forward and backward, that full tiles reach by their edge,
            the root of queries times keys; between two edges linear in their logarithm, beyond the ends constant. They
            ascend, the last one is 1. Empty: 1 everywhere.
        causal_curve: the same of causal squares, whose last fraction may be below 1; beyond the last edge they lose
            ever less (`attention_fraction`). Empty: as `attention_curve`.
        host_gb_per_s: achieved copying between device and pinned host memory, either way; None: not known, and no job
            with the device offloads.
    """

    type: str
    vendor: str
    peak_tflops: float
    gemm_tflops: float
    attention_forward_tflops: float
    attention_backward_tflops: float
    memory_gb: float
    hbm_gb_per_s: float
    overhead_gb: float
    launch_us: float
    dtypes: tuple[str, ...]
    kernel: str
    source: str
    names: tuple[str, ...] = ()
    attention_curve: Curve = ()
    causal_curve: Curve = ()
    host_gb_per_s: float | None = None

    def __post_init__(self) -> None:
        where = f"device type {self.type!r}"
        for name in ("type", "source"):
            _check_text(where, name, getattr(self, name))
        for name in ("dtypes", "names"):
            for item in _items(where, name, getattr(self, name), "texts"):
                _check_text(where, name, item)
        for field in dataclasses.fields(self):
            if field.name == "host_gb_per_s" and self.host_gb_per_s is None:
                continue
            if field.name.endswith(("_tflops", "_gb_per_s", "memory_gb")):
                _check_positive(where, field.name, getattr(self, field.name))
            elif field.name in ("overhead_gb", "launch_us"):
                _check_positive(where, field.name, getattr(self, field.name), zero=True)
        _check_choice(where, "vendor", self.vendor, VENDORS)
        _check_choice(where, "kernel", self.kernel, KERNELS)
        if not self.dtypes:
            raise ValueError(f"{where}: dtypes is empty; name at least one of {', '.join(DTYPES)}")
        for dtype in self.dtypes:
            _check_choice(where, "dtypes", dtype, tuple(DTYPES))
        _check_curve(where, "attention_curve", self.attention_curve, whole=True)
        _check_curve(where, "causal_curve", self.causal_curve, whole=False)

    @property
    def curved(self) -> bool:
        """Whether its attention rates depend on tiles at all."""
        return bool(self.attention_curve or self.causal_curve)

    def attention_fraction(self, edge: Any, *, causal: bool = False) -> Any:
        """Fraction of its attention rates in tiles of such an edge, a number or an array of them.

        A causal square is two of half the edge and a full tile: beyond the last edge of its curve, what it takes longer
        than full tiles of as many pairs halves when the edge doubles. It is no faster than a full tile of its edge.
        """
        curve = (causal and self.causal_curve) or self.attention_curve
        if not curve:
            return np.ones(np.shape(edge))
        reached = _along(curve, edge)
        if curve is self.attention_curve:
            return reached
        further = 1 / (1 + (1 / reached - 1) / np.maximum(np.divide(edge, curve[-1][0]), 1.0))
        full = _along(self.attention_curve, edge) if self.attention_curve else 1.0
        return np.maximum(reached, np.minimum(further, full))

    @property
    def kernels(self) -> tuple[str, ...]:
        """The attention kernels that can run on it."""
        return CPU_KERNELS if self.vendor == "cpu" else tuple(kernel for kernel in KERNELS if kernel != "cpu")


def _along(curve: Sequence[tuple[float, float]], edge: Any) -> Any:
    """Fractions at these edges, linear in their logarithm between two points of the curve, constant beyond its ends."""
    edges, fractions = zip(*curve, strict=True)
    return np.interp(np.log(np.maximum(edge, 1.0)), np.log(edges), fractions)


@dataclass(frozen=True)
class Seat:
    """One device of a node: its type and, for CPU ranks, the cores its process is pinned to (empty: not pinned) and
    the share of one core it may use (None: all it gets)."""

    device: Device
    cores: tuple[int, ...] = ()
    quota: float | None = None

    def __post_init__(self) -> None:
        if self.quota is None:
            return
        where, most = f"device {self.device.type}", max(1, len(self.cores))
        if self.device.vendor != "cpu":
            raise ValueError(f"{where}: quota {self.quota!r} is for CPU ranks; leave it out")
        number = isinstance(self.quota, (int, float)) and not isinstance(self.quota, bool)
        if not number or not LEAST_QUOTA <= self.quota <= most:
            raise ValueError(
                f"{where}: quota must be a share of a core, {LEAST_QUOTA:g} to {most} here, got {self.quota!r}"
            )


@dataclass(frozen=True)
class Node:
    """A class of ``count`` identical nodes. Network bandwidth is ``nics * nic_gb_per_s`` per node and direction.

    `host_memory_gb` is all memory of a node's host; None: not known, and no job on the node offloads.
    """

    name: str
    seats: tuple[Seat, ...]
    intra_gb_per_s: float
    nics: int
    nic_gb_per_s: float
    count: int = 1
    host_memory_gb: float | None = None

    def __post_init__(self) -> None:
        where = f"node {self.name!r}"
        if not self.seats:
            raise ValueError(f"{where}: has no devices")
        for name in ("intra_gb_per_s", "nics", "nic_gb_per_s"):
            _check_positive(where, name, getattr(self, name))
        if self.host_memory_gb is not None:
            _check_positive(where, "host_memory_gb", self.host_memory_gb)
        for name in ("nics", "count"):
            _check_count(where, name, getattr(self, name))

    @property
    def network_gb_per_s(self) -> float:
        return self.nics * self.nic_gb_per_s


@dataclass(frozen=True)
class Link:
    """Bandwidth between two nodes (or node classes), where it differs from what their NICs allow. Symmetric."""

    nodes: tuple[str, str]
    gb_per_s: float

    def __post_init__(self) -> None:
        _check_positive(f"link {' - '.join(self.nodes)}", "gb_per_s", self.gb_per_s)


@dataclass(frozen=True)
class Place:
    """A device of the expanded cluster: its index, seat, and its node by index, name and class name."""

    index: int
    seat: Seat
    node: int
    node_name: str
    node_class: Node

    @cached_property
    def device(self) -> Device:
        return self.seat.device


@dataclass(frozen=True)
class Cluster:
    """Node classes and the links that are special.

    Attributes:
        namespaces: CPU nodes are network namespaces of one machine, their links capped (`hexiseq.testbed`).

    Raises:
        ValueError: two nodes with one name, a link to a node that is not there, AMD and NVIDIA in one cluster.
    """

    name: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...] = ()
    namespaces: bool = False

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError(f"cluster {self.name!r}: has no nodes")
        names = [node.name for node in self.nodes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"cluster {self.name!r}: two nodes are called {name!r}; write one with count: 2, "
                                 "or give each its own name")  # fmt: skip
        known = set(names) | {place.node_name for place in self.places}
        for link in self.links:
            for name in link.nodes:
                if name not in known:
                    raise ValueError(f"cluster {self.name!r}: a link names node {name!r}; nodes are {', '.join(names)}")
        table: dict[frozenset[str], float] = {}
        for link in self.links:
            known_gb_per_s = table.setdefault(frozenset(link.nodes), link.gb_per_s)
            if known_gb_per_s != link.gb_per_s:
                raise ValueError(
                    f"cluster {self.name!r}: two links join {' and '.join(sorted(link.nodes))}, of {known_gb_per_s:g} "
                    f"and {link.gb_per_s:g} GB/s; a link has the same bandwidth both ways: give it once"
                )
        # Ranks with quotas are on one machine, whatever nodes they stand for.
        seats = [place.seat for place in self.places if place.seat.quota is not None]
        for core in sorted({core for seat in seats for core in seat.cores}):
            asked = sum(seat.quota or 0.0 for seat in seats if seat.cores == (core,))
            if asked > 1 + 1e-9:
                raise ValueError(
                    f"cluster {self.name!r}: quotas of the devices on core {core} sum to {asked:g} of it, so they "
                    "would not hold; give at most 1, or pin some to another core"
                )
        vendors = sorted({device.vendor for device in self.devices})
        if not isinstance(self.namespaces, bool):
            raise ValueError(f"cluster {self.name!r}: namespaces must be true or false, got {self.namespaces!r}")
        if self.namespaces and (self.links or vendors != ["cpu"]):
            what = "links: of pairs of nodes" if self.links else f"devices of {', '.join(vendors)}"
            raise ValueError(f"cluster {self.name!r}: namespaces: true caps the links of CPU nodes; it takes no {what}")
        if "amd" in vendors and "nvidia" in vendors:
            raise ValueError(
                f"cluster {self.name!r}: AMD and NVIDIA devices cannot share a job (no common collectives)"
            )

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """All devices, node after node, in the order written."""
        places: list[Place] = []
        node = 0
        for node_class in self.nodes:
            for i in range(node_class.count):
                name = node_class.name if node_class.count == 1 else f"{node_class.name}-{i}"
                places += [
                    Place(len(places) + j, seat, node, name, node_class) for j, seat in enumerate(node_class.seats)
                ]
                node += 1
        return tuple(places)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The distinct device types, in order of appearance."""
        return tuple(dict.fromkeys(seat.device for node in self.nodes for seat in node.seats))

    @cached_property
    def _link_table(self) -> dict[frozenset[str], float]:
        return {frozenset(link.nodes): link.gb_per_s for link in self.links}

    def bandwidth_gb_per_s(self, a: Place, b: Place) -> float:
        """Bandwidth between two devices' nodes per direction: within the node, a link's own, or the slower NICs'."""
        if a.node == b.node:
            return a.node_class.intra_gb_per_s
        for x in (a.node_name, a.node_class.name):
            for y in (b.node_name, b.node_class.name):
                if (found := self._link_table.get(frozenset((x, y)))) is not None:
                    return found
        return min(a.node_class.network_gb_per_s, b.node_class.network_gb_per_s)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Cluster:
        """Build from plain containers, as ``conf/cluster/*.yaml`` resolves to.

        Keys: ``name``; ``gpus``: catalogue entries by type; ``nodes``: list of ``name``, ``count``, ``devices`` (list
        of ``type``, ``count``, ``cores``, ``quota``), ``intra_gb_per_s``, ``nics``, ``nic_gb_per_s``,
        ``host_memory_gb``; ``links``: list of ``nodes`` (two names) and ``gb_per_s``; ``namespaces``.

        Raises:
            ValueError: naming the key, its value and what is allowed.
        """
        where = f"cluster {_name(config)!r}"
        _check_keys(where, config, required=("name", "gpus", "nodes"), optional=("links", "namespaces"))
        if not isinstance(config["gpus"], Mapping):
            raise ValueError(f"{where}: gpus must be a mapping of device types, got {config['gpus']!r}")
        catalogue = {name: _device(name, entry) for name, entry in config["gpus"].items()}
        entries = _items(where, "nodes", config["nodes"], "mappings")
        nodes = tuple(_node(where, entry, catalogue) for entry in entries)
        links = []
        for entry in _items(where, "links", config.get("links"), "mappings", optional=True):
            _check_keys(f"{where}: link", entry, required=("nodes", "gb_per_s"))
            ends = [_label(f"{where}: link", "nodes", end) for end in _items(f"{where}: link", "nodes", entry["nodes"],
                                                                             "two node names")]  # fmt: skip
            if len(ends) != 2:
                raise ValueError(f"{where}: a link joins two nodes, got {ends}")
            links.append(Link((ends[0], ends[1]), entry["gb_per_s"]))
        return Cluster(_label(where, "name", config["name"]), nodes, tuple(links), config.get("namespaces", False))


def offload_lacks(places: Sequence[Place]) -> str:
    """What is not known of these places that a job needs to keep layers' inputs in host memory, and where to say it.

    Empty where all is known.
    """
    for device in {id(place.device): place.device for place in places}.values():
        if device.host_gb_per_s is None:
            return (
                f"device type {device.type} has no host_gb_per_s, the GB/s it copies to and from host memory; add it "
                f"to its catalogue entry (cluster.gpus.{device.type}.host_gb_per_s)"
            )
    for node in {id(place.node_class): place.node_class for place in places}.values():
        if node.host_memory_gb is None:
            return f"node {node.name} has no host_memory_gb, the GB of its host's memory; add it to the cluster's node"
    return ""


def gres_of(device_type: str, names: Mapping[str, str]) -> str:
    """What a Slurm site calls a device type: as `names` says, else the text before its first underscore.

    ``h100_sxm`` is ``h100``, ``l40s`` is ``l40s``. The same goes for partitions.
    """
    return names.get(device_type) or device_type.partition("_")[0]


def device_from_config(config: Mapping[str, Any]) -> Device:
    """One catalogue entry, as ``conf/gpu/*.yaml`` holds it."""
    return _device(_name(config, "type"), config)


def _device(name: Any, entry: Mapping[str, Any]) -> Device:
    fields = dataclasses.fields(Device)
    required = tuple(f.name for f in fields if f.default is dataclasses.MISSING)
    optional = ("names", "attention_curve", "causal_curve", "host_gb_per_s")
    _check_keys(f"gpus.{name}", entry, required=required, optional=optional)
    where = f"gpus.{name}"
    tuples = {key: _items(where, key, entry.get(key), "texts", optional=key == "names") for key in ("dtypes", "names")}
    curves = {
        key: tuple(_items(where, key, point, "an edge and a fraction") for point in
                   _items(where, key, entry.get(key), "pairs of an edge and a fraction", optional=True))
        for key in ("attention_curve", "causal_curve")
    }  # fmt: skip
    return Device(**{**entry, **tuples, **curves})


def _node(where: str, entry: Mapping[str, Any], catalogue: Mapping[str, Device]) -> Node:
    where = f"{where}: node {_name(entry)!r}"
    required = ("name", "devices", "intra_gb_per_s", "nics", "nic_gb_per_s")
    _check_keys(where, entry, required=required, optional=("count", "host_memory_gb"))
    seats: list[Seat] = []
    for item in _items(where, "devices", entry["devices"], "mappings"):
        _check_keys(f"{where}: device", item, required=("type",), optional=("count", "cores", "quota"))
        _check_text(f"{where}: device", "type", item["type"])
        if item["type"] not in catalogue:
            raise ValueError(
                f"{where}: unknown device type {item['type']!r}; the cluster's gpus are {', '.join(sorted(catalogue))} "
                "(add one with +gpu@cluster.gpus.NAME=NAME)"
            )
        count = item.get("count", 1)
        _check_count(where, f"count of {item['type']}", count)
        cores = _items(f"{where}: device", "cores", item.get("cores"), "core numbers", optional=True)
        if not all(isinstance(core, int) and not isinstance(core, bool) and core >= 0 for core in cores):
            raise ValueError(
                f"{where}: device {item['type']}: cores must be core numbers, integers from 0, got {list(cores)}"
            )
        seats += [Seat(catalogue[item["type"]], cores, item.get("quota"))] * count
    rest = {key: entry[key] for key in ("intra_gb_per_s", "nics", "nic_gb_per_s")}
    host = entry.get("host_memory_gb")
    return Node(
        _label(where, "name", entry["name"]), tuple(seats), **rest, count=entry.get("count", 1), host_memory_gb=host
    )


def _check_keys(where: str, entry: Any, required: Sequence[str], optional: Sequence[str] = ()) -> None:
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: expected a mapping with {', '.join(required)}, got {entry!r}")
    missing = [key for key in required if key not in entry]
    unknown = [key for key in entry if key not in (*required, *optional)]
    if missing or unknown:
        raise ValueError(
            f"{where}: "
            + "; ".join(
                text
                for text in (
                    f"missing {', '.join(missing)}" if missing else "",
                    f"unknown {', '.join(map(str, unknown))} (known: {', '.join((*required, *optional))})"
                    if unknown
                    else "",
                )
                if text
            )
        )


def _name(entry: Any, key: str = "name") -> Any:
    """What to call an entry in messages."""
    return entry.get(key, "?") if isinstance(entry, Mapping) else "?"


def _items(where: str, name: str, value: Any, what: str, *, optional: bool = False) -> tuple[Any, ...]:
    """The items of a list; none for a null that is `optional`."""
    if value is None and optional:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{where}: {name} must be a list of {what}, got {value!r}")
    return tuple(value)


def _label(where: str, name: str, value: Any) -> str:
    """A name as text; YAML reads a bare number as an integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    _check_text(where, name, value)
    return str(value)


def _check_text(where: str, name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {name} must be a text that is not empty, got {value!r}")
    if not value.isprintable():
        raise ValueError(f"{where}: {name} must be one line of printable text, got {value!r}")


def _check_count(where: str, name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{where}: {name} must be a positive integer, got {value!r}")


def _check_positive(where: str, name: str, value: Any, *, zero: bool = False) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not (LEAST <= value <= MOST or (zero and value == 0)):
        raise ValueError(
            f"{where}: {name} must be a {'non-negative' if zero else 'positive'} number"
            f"{', 0 or' if zero else ','} {LEAST:g} to {MOST:g}, got {value!r}"
        )


def _check_curve(where: str, name: str, curve: Curve, *, whole: bool) -> None:
    """Edges ascend from 1 on, fractions do not fall, from above 0 to 1.

    Args:
        whole: the last fraction is 1.
    """
    for point in curve:
        if len(point) != 2 or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in point):
            raise ValueError(f"{where}: {name} must be pairs of an edge and a fraction, got {list(point)!r}")
    for edge, fraction in curve:
        if not 1 <= edge <= MOST or not LEAST <= fraction <= 1:
            raise ValueError(f"{where}: {name} has edges in tokens from 1 and fractions above 0 up to 1, "
                             f"got {[edge, fraction]!r}")  # fmt: skip
    for before, after in itertools.pairwise(curve):
        if after[0] <= before[0] or after[1] < before[1]:
            raise ValueError(f"{where}: {name} must have ascending edges and fractions that do not fall, got "
                             f"{list(before)!r} before {list(after)!r}")  # fmt: skip
    if whole and curve and curve[-1][1] != 1:
        raise ValueError(f"{where}: the last fraction of {name} must be 1, since the rates are those of large tiles, "
                         f"got {curve[-1][1]!r}; divide all by it and multiply the rates")  # fmt: skip


def _check_choice(where: str, name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{where}: {name} {value!r} is not one of {', '.join(choices)}")
