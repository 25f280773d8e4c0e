"""What posting the ring's transfers costs a rank's host: the runtime's own loop, without kernels and without a network.

    python -m benchmarks.posting                                       # 13B, 512k tokens on the paper's 128 GPUs
    python -m benchmarks.posting +cluster=h100_a100 model=llama3_8b data.seq_len=131072

The cluster is planned for, and the outermost and the innermost group's first rank walk their route of one attention
call with messages of one element per token and head, over a process group that sends nothing. A GPU job hides this
behind attention, and NCCL's own launch comes on top; `hexiseq.schedule` keeps slots so long that it can.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from hexiseq.attention.exchange import Links, RingGradients, walk_kv
from hexiseq.attention.layout import OWN, route
from hexiseq.plan import Plan, align
from recipes.compose import composed
from recipes.job import solve_config

SETTING = ("+cluster=paper_sim_128", "model=llama_13b", "data.seq_len=524288", "strategy.exchange=ring")
RUNS = 5
TIMEOUT = timedelta(seconds=60)


def measure(plan: Plan, rank: int) -> list[str]:
    """Least CPU time of a rank over some calls, forward and backward, as a row of the table."""
    dist.init_process_group("fake", rank=rank, world_size=plan.world_size, store=FakeStore())
    group = dist.new_group(list(range(plan.world_size)))
    path = route(plan, rank)
    links = Links(plan, rank, TIMEOUT, None, group, group, FakeStore())
    first, last = path.members[path.member].kv
    k, v, dk, dv = (torch.zeros(path.rows, 1, last - first, 1) for _ in range(4))
    forward, gradients = [], []
    for _ in range(RUNS):
        with links.buffers.lease() as lease:
            start = time.process_time()
            for _ in walk_kv(path, links, lease, k, v):
                pass
            forward.append(time.process_time() - start)
        with links.buffers.lease() as lease:
            start = time.process_time()
            home = RingGradients(path, links, lease, dk, dv)
            for block in path.blocks:
                rows = (block.grad_rows, 1, 2, last - first, 1)
                if block.side != OWN:
                    home.pass_on(block, lease.take(dk, rows).zero_() if block.grad_rows else None)
            home.come_home()
            gradients.append(time.process_time() - start)
    dist.destroy_process_group()
    messages = sum(len(sent) + len(received) for sent, received in zip(path.kv.sends, path.kv.receives, strict=True))
    device = plan.devices[rank]
    return [f"{rank} ({device.type})", str(path.total), str(len(path.blocks)), str(messages),
            f"{min(forward) / path.total * 1e6:.0f}", f"{min(gradients) / path.total * 1e6:.0f}"]  # fmt: skip


def main(overrides: Sequence[str]) -> None:
    *_, plan = solve_config(composed(["recipe=plan", *(overrides or SETTING)]))
    groups = plan.replicas[0].groups
    if plan.exchange != "ring" or len(groups) < 2:
        raise SystemExit("the plan has no ring: nothing is posted; give strategy.exchange=ring or a longer sequence")
    rows = [measure(plan, group.shards[0].rank) for group in (groups[0], groups[-1])]
    print(f"slots of {plan.slot} tokens, {plan.fusion} to a call")
    header = ["rank", "ticks", "blocks", "KV messages", "forward, us a tick", "dKV, us a tick"]
    print("\n".join(align(header, rows)))


if __name__ == "__main__":
    main(sys.argv[1:])
