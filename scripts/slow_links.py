"""Run a command once per rank, each rank in a network namespace of its own behind a capped link.

    python scripts/slow_links.py 0.05 0.05 0.0125 -- python my_job.py

starts three ranks whose links carry 50, 50 and 12.5 MB/s, each way. They find RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME in their environment, as torchrun's do, and meet at a store of this
process. `python train.py` needs none of this: a cluster with `namespaces: true` says it all. Root and Linux only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from hexiseq import testbed
from hexiseq.cluster import Cluster, Device, Node, Seat

RANK = Device(
    type="rank", vendor="cpu", peak_tflops=1, gemm_tflops=1, attention_forward_tflops=1, attention_backward_tflops=1,
    memory_gb=1, hbm_gb_per_s=1, overhead_gb=0, launch_us=0, dtypes=("float32",), kernel="cpu",
    source="stands for a rank; nothing is planned for it",
)  # fmt: skip


def cluster(caps_gb_per_s: Sequence[float]) -> Cluster:
    """A node of one rank for each cap."""
    nodes = tuple(Node(f"rank{i}", (Seat(RANK),), cap, 1, cap) for i, cap in enumerate(caps_gb_per_s))
    return Cluster("slow_links", nodes, namespaces=True)


def run(caps_gb_per_s: Sequence[float], command: Sequence[str]) -> int:
    """Returns 0 if all ranks do; when one fails the others are ended, and its code (128 + a signal's number) returned.

    Raises:
        ValueError: this machine cannot make the namespaces.
    """
    from torch.distributed import TCPStore  # what runs inside a namespace need not wait for it

    ranks = len(caps_gb_per_s)
    with testbed.built(cluster(caps_gb_per_s).places, namespaces=True) as berths:
        store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        processes = []
        for rank, berth in enumerate(berths):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1",
                "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }  # fmt: skip
            inside = [sys.executable, __file__, "--inside", berth.namespace, berth.address, "--", *command]
            processes.append(subprocess.Popen(inside, env=environment))
        try:
            return _first_failure(processes)
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def _first_failure(processes: Sequence[subprocess.Popen]) -> int:
    while True:
        codes = [process.poll() for process in processes]
        for code in codes:
            if code:
                return code if code > 0 else 128 - code
        if not any(code is None for code in codes):
            return 0
        time.sleep(0.05)


def main() -> int:
    if sys.argv[1:2] == ["--inside"]:
        namespace, address, _, *command = sys.argv[2:]
        testbed.enter(testbed.Berth(namespace=namespace, address=address))
        os.execvp(command[0], command)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caps", nargs="+", type=float, metavar="GB/S", help="of each rank's link, each way")
    if "--" not in sys.argv:
        parser.error("give the command after --")
    cut = sys.argv.index("--")
    options, command = parser.parse_args(sys.argv[1:cut]), sys.argv[cut + 1 :]
    if not command:
        parser.error("give the command after --")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return run(options.caps, command)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
