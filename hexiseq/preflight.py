"""Whether a job's links work: tried on the process groups that training uses, before its first step.

A broken link else shows as a hang minutes into a run, and a wrong one as a loss that nobody can explain. Every rank
takes part in small collectives and transfers of every kind that a step makes, in uneven sizes, and knows what must
arrive. Then all ranks meet at the store, where those that do not come are the ones the others waited for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hexiseq.attention.exchange import Group
from hexiseq.attention.layout import Traffic
from hexiseq.attention.runtime import Runtime
from hexiseq.doctor import Meeting

SUMMED = {"cpu": (4, 1_024, 262_144), "cuda": (4, 1_024, 1_048_576, 16_777_216)}  # bytes of an all-reduce
# Bytes of the largest message. NCCL connects at its first one; at the last one ranks start together.
SENT = {"cpu": (131_072,), "cuda": (1_024, 16_777_216, 16_777_216)}
_SMALL, _NUMBER = 1_024, 4  # bytes: of the other collectives, and of a float32
_PATIENCE = 0.75  # of the timeout: then a rank stops waiting for its peers, and says so while all others still listen
_SHOWN = 4  # ranks or lines of a message
_WORLD, _REPLICA, _GROUP, _KV, _DKV = "over all ranks", "in replicas", "in groups", "of KV", "of dKV"

Stage = tuple[str, str]  # what, and where
# In the order in which all ranks go through them.
STAGES: tuple[Stage, ...] = (
    ("all-reduce", _WORLD), ("all-gather", _WORLD), ("reduce-scatter", _WORLD), ("all-reduce", _REPLICA),
    ("all-reduce", _GROUP), ("all-to-all", _GROUP), ("transfers", _GROUP),
    ("transfers", _KV), ("all-to-all", _KV), ("transfers", _DKV), ("all-to-all", _DKV),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """Of a preflight that found nothing wrong.

    Attributes:
        seconds: that it took.
        stages: what was tried, by whichever ranks it concerns.
        slowest: two ranks and the GB/s between them; None where no two ranks exchange messages of their own.
    """

    seconds: float
    stages: tuple[Stage, ...]
    slowest: tuple[int, int, float] | None


def try_links(runtime: Runtime, meeting: Meeting, device: torch.device, timeout_seconds: float) -> Outcome:
    """Try every kind of transfer of the runtime's plan. Collective.

    Args:
        meeting: of all ranks, with the same timeout.

    Raises:
        ValueError: on all ranks that are there, with the same text: who does not answer, or what arrived wrong, on
            which rank and from which.
    """
    start = time.perf_counter()
    trial = _Trial(runtime, device)
    failure = _within(_PATIENCE * timeout_seconds, trial.run)
    said = {
        "stage": trial.stage,
        "peers": trial.peers,
        "failure": failure,
        "wrong": trial.wrong,
        "tried": trial.tried,
        "rates": list(trial.rates.items()),
    }
    told = meeting.gather("preflight", said, spent_seconds=time.perf_counter() - start)
    if problems := _problems(told, meeting.who):
        meeting.leave()
        raise ValueError("\n".join(["preflight: this job's links do not work:", *(f"  {line}" for line in problems),
                                    "put that right, or leave those ranks out"]))  # fmt: skip
    tried = {stage for answer in told for stage in answer["tried"]}
    stages = tuple(stage for number, stage in enumerate(STAGES) if number in tried)
    return Outcome(time.perf_counter() - start, stages, _slowest([dict(answer["rates"]) for answer in told]))


def describe(outcome: Outcome, who: Callable[[int], str], skew_seconds: float, noted: int) -> str:
    """A short block for the user.

    Args:
        skew_seconds: between the clocks of nodes.
        noted: differences between ranks that they have been told of.
    """
    by_place = itertools.groupby(outcome.stages, key=lambda stage: stage[1])
    tried = "; ".join(f"{', '.join(what for what, _ in stages)} {place}" for place, stages in by_place)
    lines = [f"preflight passed in {outcome.seconds:.2f} s", f"  {tried}"]
    if outcome.slowest is not None:
        a, b, rate = outcome.slowest
        lines.append(f"  slowest link: {rate:.3g} GB/s between {who(a)} and {who(b)}")
    lines.append(f"  nodes' clocks within {skew_seconds:.2f} s; {noted or 'no'} differences noted")
    return "\n".join(lines)


class _Trial:
    """One rank's part. Its attributes say how far it came, whenever it is asked.

    Attributes:
        stage: index in `STAGES` of the one it is at, with its `peers`; `tried` has the ones behind it.
        wrong: what arrived wrong: ``stage``, ``sender`` (None of a sum), ``text``.
        rates: best GB/s from each peer.
    """

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self.runtime, self.plan, self.rank, self.device = runtime, runtime.plan, runtime.rank, device
        self.counts = [size // _NUMBER for size in SENT[device.type]]
        self.stage = 0
        self.peers: list[int] = []
        self.tried: list[int] = []
        self.wrong: list[dict[str, Any]] = []
        self.rates: dict[int, float] = {}

    def run(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread of its own starts on the first GPU
        world = range(self.plan.world_size)
        replica = self.plan.replicas[self.plan.place(self.rank)[0]]
        route = self.runtime.route()
        for size in SUMMED[self.device.type]:
            self._sum(_WORLD, None, world, size)
        self._gather_and_scatter(world)
        self._sum(_REPLICA, self.runtime.replica_group, replica.ranks, _SMALL)
        self._sum(_GROUP, self.runtime.group, self._group(), _SMALL)
        self._in_group()
        self._across_groups(_KV, self.runtime.kv_group, route.kv)
        self._across_groups(_DKV, self.runtime.dkv_group, route.dkv)

    def _group(self) -> list[int]:
        replica, group, _ = self.plan.place(self.rank)
        return list(self.plan.replicas[replica].groups[group].ranks)

    # --- stages

    def _sum(self, place: str, group: Group | None, ranks: Iterable[int], size: int) -> None:
        ranks = list(ranks)
        if len(ranks) == 1:
            return
        self._enter(("all-reduce", place), ranks)
        count = size // _NUMBER
        total = self._addend(self.rank, count)
        dist.all_reduce(total, group=group)
        self._expect(total, self._sum_of(ranks, count))

    def _gather_and_scatter(self, world: Sequence[int]) -> None:
        """What sharded parameters and their gradients do."""
        count = _SMALL // _NUMBER
        self._enter(("all-gather", _WORLD), world)
        gathered = torch.empty(len(world) * count, device=self.device)
        dist.all_gather_single(gathered, self._message(self.rank, 0, count))
        for sender, part in zip(world, gathered.split(count), strict=True):
            self._expect(part, self._message(sender, 0, count), sender)
        self._enter(("reduce-scatter", _WORLD), world)
        share = torch.empty(count, device=self.device)
        dist.reduce_scatter_single(share, self._addend(self.rank, len(world) * count))
        self._expect(share, self._sum_of(world, len(world) * count)[self.rank * count :][:count])

    def _in_group(self) -> None:
        """The all-to-all there and back, in the plan's own proportions, and transfers around the members."""
        members, group = self._group(), self.runtime.group
        if len(members) == 1:
            return
        shards = [self.plan.shard(rank) for rank in members]
        most = max(shard.num_tokens for shard in shards) * max(shard.num_heads for shard in shards)
        mine = members.index(self.rank)

        def portion(count: int, tokens_of: int, heads_of: int) -> int:
            return -(-count * shards[tokens_of].num_tokens * shards[heads_of].num_heads // most)

        for count in self.counts:
            there = [portion(count, mine, other) for other in range(len(members))]
            back = [portion(count, other, mine) for other in range(len(members))]
            self._all_to_all(_GROUP, group, members, there, back)
            self._all_to_all(_GROUP, group, members, back, there)
        around = {members[(mine + 1) % len(members)], members[mine - 1]}
        for count in self.counts:
            portions = {rank: -(-count * (place + 1) // len(members)) for place, rank in enumerate(members)}
            self._transfer(_GROUP, group, around, portions)

    def _across_groups(self, place: str, group: Group | None, traffic: Traffic) -> None:
        """Transfers between the ranks that a step has exchange KV or dKV, larger from larger groups."""
        if group is None:
            return
        replica = self.plan.replicas[self.plan.place(self.rank)[0]]
        tokens = {rank: owner.num_tokens for owner in replica.groups for rank in owner.ranks}
        gathers = self.runtime.route().gathers
        most = max(tokens.values()) * (len(tokens) if gathers else 1)  # all at once there
        receivers = {message.receiver for batch in traffic.sends for message in batch}
        senders = {message.sender for batch in traffic.receives for message in batch}
        portions = [{rank: -(-count * held // most) for rank, held in tokens.items()} for count in self.counts]
        for portion in portions:
            self._transfer(place, group, receivers | senders, portion)
        for portion in portions if gathers else ():
            ranks = sorted(tokens)
            sends = [portion[self.rank] if rank in receivers else 0 for rank in ranks]
            receives = [portion[rank] if rank in senders else 0 for rank in ranks]
            self._all_to_all(place, group, ranks, sends, receives)

    # --- what they are made of

    def _all_to_all(
        self, place: str, group: Group | None, ranks: Sequence[int], sends: list[int], receives: list[int]
    ) -> None:
        self._enter(("all-to-all", place), ranks)
        messages = [self._message(self.rank, rank, count) for rank, count in zip(ranks, sends, strict=True)]
        received = torch.full((sum(receives),), -1.0, device=self.device)
        dist.all_to_all_single(received, torch.cat(messages), receives, sends, group=group)
        for sender, part in zip(ranks, received.split(receives), strict=True):
            self._expect(part, self._message(sender, self.rank, len(part)), sender)

    def _transfer(self, place: str, group: Group | None, peers: Collection[int], portions: Mapping[int, int]) -> None:
        """One batch of transfers, as the ring makes them, with every peer both ways.

        Args:
            portions: how many numbers a rank sends to each of its peers.
        """
        if not peers:
            return
        self._enter(("transfers", place), sorted(peers))
        received = {peer: torch.full((portions[peer],), -1.0, device=self.device) for peer in self.peers}
        sent = {peer: self._message(self.rank, peer, portions[self.rank]) for peer in self.peers}
        self._finish()
        start = time.perf_counter()
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, buffer, peer, group) for peer, buffer in received.items()]
            + [dist.P2POp(dist.isend, buffer, peer, group) for peer, buffer in sent.items()]
        )
        if len(works) != len(received) + len(sent):  # NCCL coalesces a batch into one piece of work
            works = [works[-1]] * (len(received) + len(sent))
        took: dict[int, float] = {}
        for peer, work in zip([*received, *sent], works, strict=True):
            work.wait()
            self._finish()
            took.setdefault(peer, time.perf_counter() - start)
        for sender, buffer in received.items():
            self.rates[sender] = max(self.rates.get(sender, 0.0), len(buffer) * _NUMBER / took[sender] / 1e9)
            self._expect(buffer, self._message(sender, self.rank, len(buffer)), sender)

    def _enter(self, stage: Stage, ranks: Iterable[int]) -> None:
        self.stage = STAGES.index(stage)
        # Those of all ranks go without saying, in a message of every rank to every other.
        self.peers = [] if stage[1] == _WORLD else [rank for rank in ranks if rank != self.rank]
        if self.stage not in self.tried:
            self.tried.append(self.stage)

    def _expect(self, got: Tensor, expected: Tensor, sender: int | None = None) -> None:
        if torch.equal(got, expected):
            return
        place = int((got != expected).nonzero()[0])
        text = f"element {place} of {len(got)} is {got[place]:g} instead of {expected[place]:g}"
        self.wrong.append({"stage": self.stage, "sender": sender, "text": text})

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # Whole numbers that float32 and its sums hold exactly.

    def _message(self, sender: int, receiver: int, count: int) -> Tensor:
        return (
            (torch.arange(count, device=self.device) + 7_919 * sender + 104_729 * receiver).remainder_(65_521).float()
        )

    def _addend(self, rank: int, count: int) -> Tensor:
        return (torch.arange(count, device=self.device) % 251 + rank % 64).float()

    def _sum_of(self, ranks: Sequence[int], count: int) -> Tensor:
        numbers = torch.arange(count, device=self.device) % 251
        return (numbers * len(ranks) + sum(rank % 64 for rank in ranks)).float()


def _within(seconds: float, work: Callable[[], None]) -> str | None:
    """Why `work` failed, None if it did not. In a thread: a library that waits for a peer may do so for ever."""
    failures: list[str] = []

    def attempt() -> None:
        try:
            work()
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}".splitlines()[0])

    thread = threading.Thread(target=attempt, name="preflight", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return f"no answer within {seconds:g} s"
    return failures[0] if failures else None


def _problems(told: Sequence[Mapping[str, Any]], who: Callable[[int], str]) -> list[str]:
    """What is wrong in all ranks' answers, a line each."""

    def names(ranks: Sequence[int]) -> str:
        shown = ", ".join(map(who, ranks[:_SHOWN]))
        return shown if len(ranks) <= _SHOWN else f"{shown} and {len(ranks) - _SHOWN} more"

    lines = []
    failed = [rank for rank, answer in enumerate(told) if answer["failure"]]
    # Those who wait at a later stage wait for ranks that came no further.
    first = min((told[rank]["stage"] for rank in failed), default=0)
    for rank in [rank for rank in failed if told[rank]["stage"] == first][:_SHOWN]:
        peers = f" with {names(told[rank]['peers'])}" if told[rank]["peers"] else ""
        lines.append(f"{' '.join(STAGES[first])}: {who(rank)}{peers}: {told[rank]['failure']}")
    found: dict[tuple[int, int | None], dict[int, str]] = {}
    for rank, answer in enumerate(told):
        for entry in answer["wrong"]:
            found.setdefault((entry["stage"], entry["sender"]), {}).setdefault(rank, entry["text"])
    for (stage, sender), by_rank in sorted(found.items(), key=lambda item: (item[0][0], item[0][1] or 0)):
        source = "the sum is wrong" if sender is None else f"wrong data from {who(sender)}"
        lines.append(f"{' '.join(STAGES[stage])}: {source} on {names(list(by_rank))}: {next(iter(by_rank.values()))}")
    return lines


def _slowest(rates: Sequence[Mapping[int, float]]) -> tuple[int, int, float] | None:
    """The slowest link by what its better end saw.

    Where a batch ends as one, its links all look as slow as the slowest of them; from the other end they do not.
    """
    links: dict[tuple[int, int], float] = {}
    for rank, seen in enumerate(rates):
        for peer, rate in seen.items():
            link = (min(rank, peer), max(rank, peer))
            links[link] = max(links.get(link, 0.0), rate)
    if not links:
        return None
    (a, b), rate = min(links.items(), key=lambda item: item[1])
    return a, b, rate
