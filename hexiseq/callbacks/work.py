"""Which rank does how much of the model's work: what MFU per device type is made of. See ``docs/metrics.md``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hexiseq.plan import Group, Interval, Plan
from hexiseq.workload import ModelShape, attended_pairs, attention_flops, head_flops, linear_flops


class RankWork:
    """Model FLOPs that are a rank's: forward and backward, exact pairs, nothing recomputed.

    Matrix products, the output head included, by the rank's tokens; attention by its heads and its group's queries. The
    sum over all ranks is `hexiseq.workload.model_flops`.
    """

    def __init__(self, plan: Plan, model: ModelShape, rank: int) -> None:
        self.plan, self._model = plan, model
        replica, group, _ = plan.place(rank)
        shard, self._sequences = plan.shard(rank), plan.replicas[replica].sequences
        self._heads = shard.num_heads
        self._run = joined(plan.replicas[replica].groups[group])
        linear = shard.num_tokens * (model.layers * linear_flops(model) + head_flops(model))
        self._linear = 3.0 * self._sequences * linear
        self._plain = self._linear + self._sequences * self._attention((0, plan.seq_len))

    def micro_step(self, documents: Sequence[Sequence[int]] | None = None) -> float:
        """FLOPs of one micro-step.

        Args:
            documents: of each sequence of the rank's replica, the boundaries attention stays within.
        """
        if documents is None:
            return self._plain
        return self._linear + sum(self._attention(edges) for edges in documents)

    def _attention(self, edges: Sequence[int]) -> float:
        """Of one sequence, all layers."""
        kinds = self._model.kinds
        pairs = sum(kind.layers * pairs_within(self._run, edges, kind.window) for kind in kinds)
        return 3.0 * self._heads * attention_flops(self._model, pairs)


def pairs_within(run: Sequence[Interval], edges: Sequence[int], window: int | None) -> int:
    """(query, key) pairs of queries at `run` with keys up to them, of their own document, at most `window` of them."""
    starts, ends = np.array(edges[:-1], dtype=np.int64), np.array(edges[1:], dtype=np.int64)
    total = 0
    for first, last in run:
        inside = (starts < last) & (ends > first)
        before = np.maximum(first - starts[inside], 0)
        upto = np.minimum(last, ends[inside]) - starts[inside]
        total += int((attended_pairs(upto, window) - attended_pairs(before, window)).sum())
    return total


def joined(group: Group) -> tuple[Interval, ...]:
    """A group's tokens as few intervals, at most two."""
    whole: list[list[int]] = []
    for start, end in sorted(piece for shard in group.shards for piece in shard.tokens):
        if whole and whole[-1][1] == start:
            whole[-1][1] = end
        else:
            whole.append([start, end])
    return tuple((start, end) for start, end in whole)
