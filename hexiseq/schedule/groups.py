"""Ways to form the groups of a replica: node by node in equal parts, and across nodes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from hexiseq.cluster import Place

Grouping = list[list[int]]  # per group its ranks, indices into the replica's places; outermost group first
MOST_ACROSS = 16  # devices of a group across nodes
MOST_COMBINATIONS = 16  # of node splits that are tried outright; beyond it they are improved one kind of node at a time


class Nodes:
    """The nodes of a replica by kind, and how each kind may be split into groups.

    Nodes with weak networks come last, which puts their groups innermost, where the ring carries least.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = places
        members: dict[int, list[int]] = {}
        for rank, place in enumerate(places):
            members.setdefault(place.node, []).append(rank)
        order = sorted(members, key=lambda node: (-places[members[node][0]].node_class.network_gb_per_s, node))
        self.members = [members[node] for node in order]
        kinds = [(places[ranks[0]].node_class.name, *(places[r].device.type for r in ranks)) for ranks in self.members]
        distinct = list(dict.fromkeys(kinds))
        self.kind = [distinct.index(kind) for kind in kinds]
        self.splits = [node_splits(kind[1:]) for kind in distinct]

    def grouping(self, chosen: Sequence[int]) -> Grouping:
        """Groups inside nodes: of each kind of node the split of that index."""
        return [
            [ranks[i] for i in part]
            for ranks, kind in zip(self.members, self.kind, strict=True)
            for part in self.splits[kind][chosen[kind]]
        ]

    def starts(self) -> list[tuple[int, ...]]:
        """Choices to begin with: all there are if they are few, else those of about the same size everywhere."""
        if math.prod(len(splits) for splits in self.splits) <= MOST_COMBINATIONS:
            return list(itertools.product(*(range(len(splits)) for splits in self.splits)))
        return self.alike()

    def alike(self) -> list[tuple[int, ...]]:
        """Choices of groups of about the same size everywhere."""
        widths = sorted({len(part) for splits in self.splits for split in splits for part in split})
        return list(dict.fromkeys(tuple(
            min(range(len(splits)), key=lambda i: (abs(_mean_width(splits[i]) - width), i)) for splits in self.splits
        ) for width in widths))  # fmt: skip

    def neighbours(self, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Choices that differ in one kind of node."""
        for kind, splits in enumerate(self.splits):
            for i in range(len(splits)):
                if i != chosen[kind]:
                    yield (*chosen[:kind], i, *chosen[kind + 1 :])

    def across(self) -> list[Grouping]:
        """Groups across nodes, of which the ring stays inside nodes while heads cross them.

        Devices of several nodes of a kind, one of each; groups of equal strength, one device of each kind in turn; and
        runs of neighbours.
        """
        if len(self.members) == 1:
            return []
        places, total = self.places, len(self.places)
        by_node = [rank for ranks in self.members for rank in ranks]
        by_speed = sorted(range(total), key=lambda r: (-places[r].device.attention_forward_tflops, r))
        found = [self._abreast(width) for width in (2, 4, 8, MOST_ACROSS)]
        for count in (c for c in range(1, total) if total % c == 0 and total // c <= MOST_ACROSS):
            width = total // count
            found.append([sorted(by_speed[i::count]) for i in range(count)])
            found.append([by_node[i * width : (i + 1) * width] for i in range(count)])
        return found

    def _abreast(self, width: int) -> Grouping:
        """Groups of one device each of so many nodes of a kind, or as many as there are."""
        found: Grouping = []
        for kind in dict.fromkeys(self.kind):
            nodes = [ranks for ranks, k in zip(self.members, self.kind, strict=True) if k == kind]
            for first in range(0, len(nodes), width):
                found += [list(seats) for seats in zip(*nodes[first : first + width], strict=True)]
        return found


def _mean_width(split: list[list[int]]) -> float:
    return sum(map(len, split)) / len(split)


def node_splits(types: Sequence[str]) -> list[list[list[int]]]:
    """Partitions of a node's devices: runs and strides of equal size, and one group per type."""
    n = len(types)
    kinds = sorted(range(n), key=lambda i: (types.index(types[i]), i))
    found: list[list[list[int]]] = []
    for count in (c for c in range(1, n + 1) if n % c == 0):
        width = n // count
        found.append([kinds[i * width : (i + 1) * width] for i in range(count)])
        if len(set(types)) > 1:
            found.append([sorted(kinds[i::count]) for i in range(count)])
    if len(set(types)) > 1:
        found.append([[i for i in range(n) if types[i] == kind] for kind in dict.fromkeys(types)])
    unique = {tuple(tuple(members) for members in split): split for split in found}
    return list(unique.values())
