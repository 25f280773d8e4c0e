"""Documents lie where they keep all groups busy, the same on every rank, and nothing is lost."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hexiseq.data import HexiSeqDataModule
from hexiseq.documents import balanced_order, group_pairs
from hexiseq.plan import Plan, RankDevice, make_replica


def ring_plan(*replicas: tuple[int, ...], slot: int = 64) -> Plan:
    """Groups of one with so many slots, per replica."""
    made, rank = [], 0
    for slots in replicas:
        counts = [(n, [(rank + i, n * slot, 4)]) for i, n in enumerate(slots)]
        made.append(make_replica(sum(slots) * slot, slot, counts, 1))
        rank += len(slots)
    devices = tuple(RankDevice("cpu", "n", "cpu") for _ in range(rank))
    seq_len = sum(replicas[0]) * slot
    return Plan("manual", seq_len, 4, 2, slot, 1, "ring", "none", "float32", tuple(made), devices)


def draw(seq_len: int, mean: int, seed: int) -> list[int]:
    rng, ends = np.random.default_rng(seed), [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + int(rng.integers(max(1, mean // 4), mean * 7 // 4 + 1))))
    return np.diff(ends).tolist()


@pytest.mark.parametrize("slots", [(8, 8), (12, 6, 6), (3, 2, 1, 1, 1)])
def test_pairs_of_groups_are_those_of_their_tokens(slots):
    plan = ring_plan(slots, slot=8)
    for seed in range(5):
        lengths = draw(plan.seq_len, 20, seed)
        starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        pairs = np.arange(plan.seq_len) - starts + 1
        expected = [pairs[shard.positions()].sum() for shard in plan.shards()]
        assert group_pairs(np.array([lengths]), plan, 0).tolist() == [expected]


def excess(lengths: list[int], plan: Plan, replica: int = 0) -> float:
    pairs = group_pairs(np.array([lengths]), plan, replica)[0]
    tokens = np.array([group.num_tokens for group in plan.replicas[replica].groups])
    return float((pairs / pairs.sum() / (tokens / tokens.sum())).max()) - 1


@pytest.mark.parametrize("slots", [(8, 8), (12, 6, 6), (12, 6, 6, 3, 3, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_the_order_evens_out_what_chance_does_not(slots, seed):
    plan = ring_plan(slots)
    lengths = draw(plan.seq_len, plan.seq_len // 16, seed)
    order = balanced_order(lengths, plan, 0)
    assert sorted(order) == list(range(len(lengths)))
    assert order == balanced_order(lengths, plan, 0)
    assert excess([lengths[i] for i in order], plan) <= min(0.05, max(0.01, excess(lengths, plan)))


def test_one_document_one_group_and_very_many_documents_stay_as_they_are():
    assert balanced_order([1024], ring_plan((8, 8)), 0) == [0]
    assert balanced_order([1000, 24], ring_plan((16,)), 0) == [0, 1]
    many = ring_plan((8, 8), slot=8192)
    assert balanced_order([4] * (many.seq_len // 4), many, 0) == list(range(many.seq_len // 4))


def test_documents_that_do_not_fill_the_sequence_are_refused():
    with pytest.raises(AssertionError, match="documents of 1000 tokens for a sequence of 1024"):
        balanced_order([1000], ring_plan((8, 8)), 0)


def test_batches_hold_the_same_documents_in_an_order_of_the_replica():
    plan = ring_plan((6, 2), (4, 4))
    settings = {"documents": 30, "length": 80, "vocab_size": 32, "noise": 0.1}

    def batches(arrange: bool, rank: int, mask: bool = True) -> list[dict]:
        module = HexiSeqDataModule(
            "synthetic", 512, 3, 0.1, synthetic=settings, mask_documents=mask, arrange_documents=arrange
        )
        module.trainer = SimpleNamespace(strategy=SimpleNamespace(plan=plan, global_rank=rank))
        module.setup()
        found = iter(module.train_dataloader())
        return [next(found) for _ in range(3)]

    def documents(batch: dict) -> list[tuple[int, ...]]:
        ends = batch["documents"][0]
        return [tuple(batch["input_ids"][0, a:b].tolist()) for a, b in itertools.pairwise(ends)]

    for replica, ranks in enumerate(((0, 1), (2, 3))):
        drawn, arranged, again = batches(False, ranks[0]), batches(True, ranks[0]), batches(True, ranks[1])
        for before, after, other in zip(drawn, arranged, again, strict=True):
            assert torch.equal(after["input_ids"], other["input_ids"])
            assert after["documents"] == other["documents"]
            assert sorted(documents(before)) == sorted(documents(after))
            lengths = [np.diff(batch["documents"][0]).tolist() for batch in (before, after)]
            assert excess(lengths[1], plan, replica) <= max(0.01, excess(lengths[0], plan, replica))
        assert any(before["documents"] != after["documents"] for before, after in zip(drawn, arranged, strict=True))
    # Without the mask documents see each other, so their order matters and stays.
    assert all(torch.equal(a["input_ids"], b["input_ids"])
               for a, b in zip(batches(True, 0, mask=False), batches(False, 0, mask=False), strict=True))  # fmt: skip
