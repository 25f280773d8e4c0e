"""Process groups and kernels of a plan: made once by all ranks together, used by every attention call after that."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from hexiseq.attention import kernels
from hexiseq.attention.clock import CLOCK
from hexiseq.attention.exchange import Group, Links
from hexiseq.attention.layout import Route, route
from hexiseq.attention.tiles import Mask
from hexiseq.plan import Plan

DEFAULT_TIMEOUT = timedelta(minutes=10)
_KEPT_ROUTES = 32  # documents change with every micro-step; forward and backward of all its layers share a route


class Runtime:
    """What a process needs to run a plan. Making one is collective: all ranks, the same plans in the same order.

    Several can be alive at once; attention calls with an equal plan use the latest. Process groups with the ranks of an
    earlier plan's are used again, so a plan that only moves tokens or heads needs no new communicators.

    Args:
        plan: of all ranks of the job; this process is the plan's rank ``dist.get_rank()``.
        timeout: of every transfer; a process group made by `new_group` does not inherit one.

    Attributes:
        replica_group, group, kv_group, dkv_group: process groups of the own replica, of the own group in member order,
            and of the replica's KV and dKV traffic; None where there would be nobody else.
        calls: times the operator ran ``forward`` and ``backward``.
        failure: of a call, after which none can follow.

    Raises:
        ValueError: the world has another size than the plan, the ranks do not agree on the plan, or a rank cannot run
            its kernel. All ranks raise.
        RuntimeError: torch.distributed is not initialised.
    """

    def __init__(self, plan: Plan, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        if not dist.is_initialized():
            raise RuntimeError("attention over a plan needs torch.distributed: call init_process_group first")
        _forget_other_worlds()
        if dist.get_world_size() != plan.world_size:
            raise ValueError(f"the plan has {plan.world_size} ranks, the job {dist.get_world_size()}")
        self.plan, self.rank, self.timeout = plan, dist.get_rank(), timeout
        self.kernel = _agree(plan, self.rank)
        self.calls: Counter[str] = Counter()
        self.failure: str | None = None
        self._entered = 0
        self._routes: OrderedDict[tuple, Route] = OrderedDict()
        self._agreed: set[tuple] = set()
        self._keys: list[tuple] = []
        mine: dict[str, Group | None] = {}
        for replica in plan.replicas:
            # KV groups span the replica whatever ranks hold heads now: a later plan may move them.
            ring = len(replica.groups) > 1
            wanted = [("replica", sorted(replica.ranks)), *(("group", group.ranks) for group in replica.groups)]
            wanted += [(kind, sorted(replica.ranks)) for kind in ("kv", "dkv") if ring]
            for kind, ranks in wanted:
                made = self._process_group(kind, ranks)
                if self.rank in ranks:
                    mine[kind] = made
        self.replica_group = mine.get("replica")
        self.group, self.kv_group, self.dkv_group = mine.get("group"), mine.get("kv"), mine.get("dkv")
        self.links = Links(plan, self.rank, timeout, self.group, self.kv_group, self.dkv_group, _store())
        self.handle = next(_handles)
        _runtimes[self.handle] = self
        _by_digest[plan.digest()] = self

    @property
    def num_heads(self) -> int:
        """Query heads of this rank."""
        return self.plan.shard(self.rank).num_heads

    @property
    def group_tokens(self) -> int:
        """Tokens of this rank's group."""
        replica, group, _ = self.plan.place(self.rank)
        return self.plan.replicas[replica].groups[group].num_tokens

    def route(self, causal: bool = True, window: int = 0, documents: Tensor | None = None) -> Route:
        """What this rank does in an attention call.

        Args:
            window: 0 for none.
            documents: from `flat_documents`.
        """
        key = (causal, window, None if documents is None else documents.numpy().tobytes())
        if key not in self._routes:
            mask = Mask(causal, window or None, None if documents is None else _documents(documents))
            self._routes[key] = route(self.plan, self.rank, mask)
            if len(self._routes) > _KEPT_ROUTES:
                self._routes.popitem(last=False)
        self._routes.move_to_end(key)
        return self._routes[key]

    def enter(self) -> int:
        """The number of a new call. Raises RuntimeError after one has failed: ranks may be at different steps of it."""
        if self.failure is not None:
            raise RuntimeError(
                f"an earlier attention call of this plan failed; restart the job. It said: {self.failure}"
            )
        self._entered += 1
        return self._entered

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around what ranks do together: a failure in it is remembered."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or f"{type(error).__name__}: {error}"
            raise

    def agree(self, device: torch.device, documents: tuple[tuple[int, ...], ...] | None, **call: float) -> None:
        """Have all ranks of the replica say what they are about to compute. Raises ValueError where they differ.

        On CPUs every call is compared. On GPUs hearing the answer would stall the queue: calls are compared when a rank
        has not made one like it before, without their number and their documents, which are always new. While the clock
        runs, ranks meet before every call all the same: waiting for a slower one and the transfers after it are told
        apart.

        Args:
            call: numbers by the name under which an error shows them.
        """
        if self.replica_group is None:
            return
        ranks = self.links.replica_ranks
        others = [rank for rank in ranks if rank != self.rank]
        if device.type == "cpu":
            call["documents"] = sum(map(len, documents or ()))
            call["documents_checksum"] = zlib.crc32(repr(documents).encode())
            call["plan"] = int(self.plan.digest()[:12], 16)  # as much as a float64 holds
        else:
            del call["number"]
            if tuple(call.values()) in self._agreed:
                if CLOCK.timing:
                    with self.links.naming("meeting", others, "wait"):
                        dist.all_reduce(torch.zeros(1, device=device), group=self.replica_group)
                return
            self._agreed.add(tuple(call.values()))
        said = torch.empty(len(ranks), len(call), dtype=torch.float64, device=device)
        own = torch.tensor([list(call.values())], dtype=torch.float64, device=device)
        with self.links.naming("comparing calls", others, "wait"):
            dist.all_gather_single(said, own, group=self.replica_group)
        first, *rest = said.tolist()
        for rank, theirs in zip(ranks[1:], rest, strict=True):
            for name, a, b in zip(call, first, theirs, strict=True):
                if a != b:
                    a, b = (int(x) if x.is_integer() else x for x in (a, b))
                    raise ValueError(
                        f"ranks call attend differently: {name} is {a} on rank {ranks[0]}, {b} on rank {rank}; all "
                        "ranks of a replica must make the same calls, in the same order"
                    )

    def close(self) -> None:
        """Forget the plan, and destroy the process groups no other plan uses. Collective; waits for all ranks."""
        if _runtimes.pop(self.handle, None) is None:
            return
        if _by_digest.get(self.plan.digest()) is self:
            del _by_digest[self.plan.digest()]
        _by_plan.clear()
        unused = [key for key in self._keys if not any(key in other._keys for other in _runtimes.values())]
        if unused:
            dist.barrier()
        for key in unused:
            group = _groups.pop(key)
            if group is not None:
                dist.destroy_process_group(group)

    def _process_group(self, kind: str, ranks: Sequence[int]) -> Group | None:
        """The process group of `ranks` for one kind of traffic, None for a single rank and for outsiders."""
        if len(ranks) == 1:
            return None
        key = (kind, tuple(ranks), self.timeout)
        if key not in _groups:
            # All ranks make every group, in plan order; unsorted, so that a group's ranks are its members in order.
            group = dist.new_group(list(ranks), timeout=self.timeout, sort_ranks=False, group_desc=f"hexiseq_{kind}")
            _groups[key] = group if self.rank in ranks else None
            if self.rank in ranks:
                dist.all_reduce(torch.zeros(1, device=_device()), group=group)
        self._keys.append(key)
        return _groups[key]


_handles = itertools.count()
_runtimes: dict[int, Runtime] = {}
_groups: dict[tuple, Group | None] = {}
_by_digest: dict[str, Runtime] = {}
_by_plan: dict[int, tuple[weakref.ref[Plan], Runtime]] = {}
_world: list[object] = []


def runtime_for(plan: Plan, timeout: timedelta = DEFAULT_TIMEOUT) -> Runtime:
    """The runtime of a plan, or of one with the same digest. Made with `timeout`, collectively, if there is none."""
    _forget_other_worlds()
    # A digest is a walk over the whole plan; a plan object seen before needs none.
    known = _by_plan.get(id(plan))
    if known is not None and known[0]() is plan:
        return known[1]
    runtime = _by_digest.get(plan.digest()) or Runtime(plan, timeout)
    _by_plan[id(plan)] = (weakref.ref(plan, functools.partial(_forget_plan, id(plan))), runtime)
    return runtime


def _forget_plan(key: int, gone: weakref.ref[Plan]) -> None:
    # At the interpreter's end the table may be gone before the last plan is.
    if _by_plan is not None and key in _by_plan and _by_plan[key][0] is gone:
        del _by_plan[key]


@functools.lru_cache(maxsize=_KEPT_ROUTES)
def flat_documents(documents: tuple[tuple[int, ...], ...] | None) -> Tensor | None:
    """A mask's documents as the operator takes them: int64, the boundaries of one sequence after the other."""
    if documents is None:
        return None
    with torch.inference_mode(False):  # a later call may have to save it for backward
        return torch.tensor([edge for edges in documents for edge in edges])


def _documents(flat: Tensor) -> tuple[tuple[int, ...], ...]:
    edges = flat.tolist()
    starts = [i for i, edge in enumerate(edges) if edge == 0]
    return tuple(tuple(edges[a:b]) for a, b in itertools.pairwise([*starts, len(edges)]))


def runtime_of(handle: int) -> Runtime:
    """The runtime with that handle. Raises RuntimeError if it has been closed."""
    if handle not in _runtimes:
        raise RuntimeError(f"attention runtime {handle} has been closed")
    return _runtimes[handle]


def close_all() -> None:
    """Close all runtimes. Collective."""
    for runtime in list(_runtimes.values()):
        runtime.close()


def _forget_other_worlds() -> None:
    """Drop what belonged to a torch.distributed job that has since been shut down in this process."""
    world = dist.group.WORLD
    if _world and _world[0] is not world:
        for registry in (_runtimes, _groups, _by_digest, _by_plan):
            registry.clear()
    _world[:] = [world]


def _agree(plan: Plan, rank: int) -> kernels.Kernel:
    """Load this rank's kernel, after all ranks have said that they can and that their plan is the same."""
    kernel, reason = None, ""
    try:
        kernel = kernels.load(plan.devices[rank].kernel, plan.dtype)
    except ValueError as error:
        reason = str(error)
    mine = torch.tensor([int(plan.digest(), 16) >> 1, int(kernel is None)], device=_device())
    said = [torch.empty_like(mine) for _ in range(plan.world_size)]
    dist.all_gather(said, mine)
    digests, failed = zip(*(t.tolist() for t in said), strict=True)
    others = [r for r, digest in enumerate(digests) if digest != digests[0]]
    if others:
        raise ValueError(f"ranks {others} run another plan than rank 0; rank {rank} has the plan {plan.digest()}")
    if reason:
        raise ValueError(f"rank {rank} ({plan.devices[rank].type} on {plan.devices[rank].node}): {reason}")
    if any(failed):
        bad = [f"rank {r} cannot run its kernel {plan.devices[r].kernel!r}" for r, f in enumerate(failed) if f]
        raise ValueError(f"{', '.join(bad)}; the choices are {', '.join(kernels.NAMES)}")
    assert kernel is not None
    return kernel


def _store() -> dist.Store:
    """The job's own key-value store; a store of a name that no public function returns."""
    return dist.PrefixStore("hexiseq_attention", dist.distributed_c10d._get_default_store())


def _device() -> torch.device:
    """Where the job's collectives want their tensors."""
    cuda = torch.cuda.is_available() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
