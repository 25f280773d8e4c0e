"""The order of the documents packed into a sequence, chosen so that all groups of a plan have their share of attention.

A plan cuts tokens. Attention within documents costs the square of each document's length, so where a long document lies
decides which group computes it. Documents do not see one another: any order trains the same, and the most even one is
free.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hexiseq.plan import Plan, group_intervals

EVEN_ENOUGH = 0.01  # excess of the slowest group's work over its share at which the search ends
CANDIDATES, ROUNDS = 64, 24  # orders tried in a round, rounds at most
MOST_TERMS = 4_000_000  # of the largest array; beyond it there are so many documents that chance evens them out


def balanced_order(lengths: Sequence[int], plan: Plan, replica: int) -> list[int]:
    """In which order to pack documents, as indices into `lengths`.

    A group's share is its part of the tokens, for a plan gives tokens by speed. The search starts from the order given
    and swaps documents; it is deterministic, so that all ranks of a replica find the same order.

    Args:
        lengths: tokens of each document, in the order drawn; their sum is the plan's `seq_len`.
    """
    assert sum(lengths) == plan.seq_len, f"documents of {sum(lengths)} tokens for a sequence of {plan.seq_len}"
    groups = plan.replicas[replica].groups
    count, points = len(lengths), 4 * len(groups)
    best = np.arange(count)
    if len(groups) == 1 or count == 1 or CANDIDATES * count * points > MOST_TERMS:
        return best.tolist()
    all_lengths, rng = np.asarray(lengths, np.int64), np.random.default_rng(0)
    excess = _excess(all_lengths[best][None], plan, replica)[0]
    for _ in range(ROUNDS):
        if excess <= EVEN_ENOUGH:
            break
        orders = np.repeat(best[None], CANDIDATES, axis=0)
        orders[: CANDIDATES // 2] = rng.permuted(orders[: CANDIDATES // 2], axis=1)
        rows = np.arange(CANDIDATES // 2, CANDIDATES)
        one, other = rng.integers(0, count, (2, len(rows)))
        orders[rows, one], orders[rows, other] = orders[rows, other], orders[rows, one]
        found = _excess(all_lengths[orders], plan, replica)
        if found.min() < excess:
            best, excess = orders[found.argmin()], found.min()
    return best.tolist()


def group_pairs(lengths: np.ndarray, plan: Plan, replica: int) -> np.ndarray:
    """(query, key) pairs within documents that each group computes, per query head: ``[orders, groups]``.

    Args:
        lengths: tokens of the documents as they lie in the sequence, int64 ``[orders, documents]``.
    """
    groups = plan.replicas[replica].groups
    runs = np.array(group_intervals(plan.seq_len, plan.slot, [group.slots for group in groups]))
    starts = np.cumsum(lengths, axis=1) - lengths
    edges = runs.reshape(-1)  # front start, front end, back start, back end of every group
    reached = np.clip(edges - starts[:, :, None], 0, lengths[:, :, None])
    before = (reached * (reached + 1) // 2).sum(axis=1).reshape(-1, len(groups), 4)
    return before[:, :, 1] - before[:, :, 0] + before[:, :, 3] - before[:, :, 2]


def _excess(lengths: np.ndarray, plan: Plan, replica: int) -> np.ndarray:
    """By how much the slowest group's part of the work exceeds its part of the tokens, ``[orders]``."""
    tokens = np.array([group.num_tokens for group in plan.replicas[replica].groups])
    pairs = group_pairs(lengths, plan, replica)
    shares = pairs / pairs.sum(axis=1, keepdims=True) / (tokens / tokens.sum())
    return shares.max(axis=1) - 1
