"""For tests: plans drawn at random, and a pool of gloo worker processes that is started once for many cases.

    with Pool(3) as pool:
        results = pool.run(function, *args)     # function(*args) on all ranks; a list of what they returned

Workers fork from a server that has imported torch already, so a pool starts in about a second. A worker that raises,
dies or hangs is named with its rank; the pool starts afresh for the next case.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from hexiseq.plan import Plan, RankDevice, group_intervals, make_replica

_GRACE_SECONDS = 5.0


def _split(rng: random.Random, total: int, parts: int) -> list[int]:
    """`total` cut into `parts` at random; zeros and skew are common."""
    weights = [rng.choice((0, 1, 1, 2, 5, 12)) * rng.random() for _ in range(parts)]
    if not any(weights):
        weights[rng.randrange(parts)] = 1.0
    cuts = [round(total * sum(weights[:i]) / sum(weights)) for i in range(parts + 1)]
    sizes = [b - a for a, b in itertools.pairwise(cuts)]
    if parts > 1 and rng.random() < 0.3:  # a rank with a single token or head
        giver = max(range(parts), key=sizes.__getitem__)
        taker = rng.choice([i for i in range(parts) if i != giver])
        moved = sizes[taker] + sizes[giver] - 1
        if moved > 0:
            sizes[taker], sizes[giver] = 1, moved
    return sizes


def draw_plan(seed: int, dtype: str = "float64", kernel: str = "cpu", exchange: str = "ring") -> Plan:
    """A small plan drawn at random: 1 to 6 ranks in groups of 1 to 4, now and then two replicas, ranks shuffled.

    Tokens and heads are skewed, down to none or one of a rank; query heads per KV head are 1, 2, 3 or 8; groups own 1
    to 6 slots and more; the sequence often does not divide. The same `seed` gives the same plan.
    """
    rng = random.Random(seed)
    world = rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 6))
    replicas = 2 if world >= 4 and rng.random() < 0.25 else 1
    sizes = [world] if replicas == 1 else [2, world - 2]
    ratio, kv = rng.choice((1, 2, 3, 8)), rng.choice((1, 2, 3, 4))
    heads, half = ratio * kv, rng.randint(1, 5)
    shapes: list[tuple[list[int], list[int]]] = []
    for size in sizes:
        groups: list[int] = []
        while sum(groups) < size:
            groups.append(rng.randint(1, min(4, size - sum(groups))) if rng.random() < 0.6 else 1)
        shapes.append((groups, [rng.choice((1, 1, 2, 3, 4, 6)) for _ in groups]))
    total = max(sum(slots) for _, slots in shapes)
    for _, slots in shapes:  # replicas cover the same sequence with as many slots
        slots[rng.randrange(len(slots))] += total - sum(slots)
    seq_len = total * 2 * half - rng.choice((0, 0, rng.randint(0, half), half))
    made, rank = [], 0
    for groups, slots in shapes:
        cut = []
        for members, n, (front, back) in zip(groups, slots, group_intervals(seq_len, 2 * half, slots), strict=True):
            tokens = _split(rng, front[1] - front[0] + back[1] - back[0], members)
            share = _split(rng, heads, members)
            cut.append((n, [(rank + i, tokens[i], share[i]) for i in range(members)]))
            rank += members
        made.append(make_replica(seq_len, 2 * half, cut))
    plan = Plan(
        policy="manual", seq_len=seq_len, num_heads=heads, num_kv_heads=kv, slot=2 * half, fusion=rng.randint(1, 4),
        exchange=exchange, recompute="none", dtype=dtype, replicas=tuple(made),
        devices=(RankDevice("cpu", "here", kernel),) * world,
    )  # fmt: skip
    order = list(range(world))
    rng.shuffle(order)
    return plan.relabel(order)


def draw_mask(seed: int, seq_len: int, sequences: int) -> dict[str, Any]:
    """The ``causal``, ``documents`` and ``window`` of an attention call, drawn at random: plain in a quarter of cases.

    Documents have from 1 token to all, another set for each sequence; windows from 1 token to more than all.
    """
    rng = random.Random(seed)
    kind = rng.choice(("plain", "documents", "window", "both", "documents", "window", "not causal", "not causal"))
    found: dict[str, Any] = {"causal": kind != "not causal", "documents": None, "window": None}
    if kind in ("documents", "both") or (kind == "not causal" and rng.random() < 0.5):
        edges = [
            sorted({0, seq_len, *(rng.randint(1, seq_len) for _ in range(rng.choice((0, 1, 2, 4, 8))))})
            for _ in range(sequences)
        ]
        found["documents"] = edges if rng.random() < 0.8 else [edges[0]] * sequences
    if kind in ("window", "both"):
        found["window"] = rng.choice((1, 2, rng.randint(1, seq_len), rng.randint(1, seq_len), seq_len + 1))
    return found


class WorkerError(RuntimeError):
    """A worker raised, died or hung. The text has every failed rank, with its traceback where there is one."""


class Pool:
    """`world_size` processes that are the ranks of one gloo job.

    Args:
        world_size: number of ranks.
        timeout: seconds a case may take before its ranks count as hung.
    """

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._workers: list[tuple[Any, Connection]] = []
        self._store: Any = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers]

    def run(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """``function(*args)`` in all ranks. Returns their results, by rank.

        Both must pickle: `function` is a module-level one. It finds its rank by ``torch.distributed.get_rank()``.

        Raises:
            WorkerError: naming the ranks that raised, died, or did not finish within `timeout` seconds.
        """
        if not self._workers:
            self._start()
        results, failures = self._collect((function, args), timeout or self.timeout)
        if failures:
            self.close()
            raise WorkerError("\n".join(failures[rank] for rank in sorted(failures)))
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop the workers; those that do not leave by themselves are killed."""
        for _, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send(None)
        deadline = time.monotonic() + 1.0
        for process, connection in self._workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        self._workers, self._store = [], None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # Port 0 lets the system choose a free one, and the store that listens on it lives here: no race for it.
        self._store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "lightning.pytorch", "hexiseq.strategy"])
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            args = (rank, self.world_size, self._store.port, self.timeout, theirs)
            process = context.Process(target=_serve, args=args, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        _, failures = self._collect(None, 120.0)
        if failures:
            self.close()
            raise WorkerError("\n".join(failures.values()))

    def _collect(self, case: Any, timeout: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Hand out a case, if there is one, and gather an answer from every rank, or the lack of one."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        if case is not None:
            for rank, (_, connection) in enumerate(self._workers):
                try:
                    connection.send(case)
                except OSError:
                    failures[rank] = self._death(rank)
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers) if rank not in failures}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for connection in [c for c in waiting if c in ready]:
                rank = waiting.pop(connection)
                try:
                    worked, value = connection.recv()
                except (EOFError, OSError):
                    failures[rank] = self._death(rank)
                    continue
                if worked:
                    results[rank] = value
                else:
                    failures[rank] = f"rank {rank} raised:\n{value}"
            if failures:  # the others may be waiting for that one for ever
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            if not ready:
                break
        for rank in waiting.values():
            failures[rank] = f"rank {rank} hung: no answer within {timeout:g} s, or {_GRACE_SECONDS:g} s of a failure"
        return results, failures

    def _death(self, rank: int) -> str:
        process = self._workers[rank][0]
        process.join(1.0)
        code = process.exitcode
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {signal.Signals(-code).name}"
        return f"rank {rank} died: {how}"


def as_launched() -> None:
    """Give a worker the environment torchrun would have given it, for Lightning, and keep Lightning quiet."""
    import torch.distributed as dist

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world, GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="pool", HEXISEQ_NODE="here",
    )  # fmt: skip
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _serve(rank: int, world_size: int, port: int, timeout: float, connection: Connection) -> None:
    """A worker: joins the job, then runs cases until it is told to leave or the parent is gone."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False)
        limit = timedelta(seconds=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)
        connection.send((True, None))
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    while True:
        try:
            case = connection.recv()
        except (EOFError, OSError):
            return
        except Exception:  # the case does not unpickle here
            connection.send((False, traceback.format_exc()))
            continue
        if case is None:
            os._exit(0)  # an orderly exit of gloo waits for peers that may be gone
        function, args = case
        try:
            connection.send((True, function(*args)))
        except Exception:
            connection.send((False, traceback.format_exc()))
