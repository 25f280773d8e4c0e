"""One way into a job: start the local ranks, or join the ranks a launcher (torchrun, one task a rank) has started.

The process the user started composes the configuration and prepares the run folder; ranks only ever read what it
prepared. A worker is a command (``python -m recipes.NAME RUN_DIR``), so nothing is pickled and Hydra never runs twice.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hexiseq import testbed
from hexiseq.plan import RankDevice

log = logging.getLogger(__name__)

USER_ERROR_CODE = 2
SHUTDOWN_SECONDS = 10  # a rank that has not ended this long after it was asked to is killed
ENDED_CODE = 128 + signal.SIGTERM
_JOIN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankFailed(RuntimeError):
    """A rank of a local job died or raised; the message names it and says where its log is."""


class Interrupted(RuntimeError):
    """A signal to the process that started the ranks ended the run. ``code`` is the shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; all ranks have stopped")
        self.code = 128 + number


def joined() -> bool:
    """Whether a launcher has already started the ranks, this process being one of them."""
    return all(name in os.environ for name in _JOIN_VARIABLES)


def rank() -> int:
    """Global rank of this process; 0 where nothing was launched."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def broadcast_run(prepare: Callable[[], dict[str, Any]] | None, timeout_seconds: float) -> dict[str, Any]:
    """Give every joined rank what rank 0 prepared: plain containers, sent as JSON through the rendezvous store.

    Args:
        prepare: called on rank 0 only. Its ValueError reaches every rank, so none is left waiting.

    Raises:
        ValueError: what `prepare` raised, or that rank 0 said nothing within `timeout_seconds`.
    """
    import torch.distributed as dist

    wait = timedelta(seconds=timeout_seconds)
    base, this, ranks = next(dist.rendezvous("env://", timeout=wait))
    store = dist.PrefixStore(f"hexiseq/run/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", base)
    if this == 0:
        assert prepare is not None
        answer: dict[str, Any] = {}
        try:
            answer["run"] = prepare()
        except ValueError as error:
            answer["error"] = str(error)
            raise
        finally:
            store.set("run", json.dumps(answer or {"error": "rank 0 failed while preparing the run"}))
            # Rank 0 may host the store: it must outlive the last reader.
            _wait(
                store,
                [f"read/{other}" for other in range(1, ranks)],
                wait,
                "the configuration was not read by all ranks",
            )
        return answer["run"]
    _wait(store, ["run"], wait, f"rank {this}: rank 0 gave no configuration")
    answer = json.loads(store.get("run"))
    store.set(f"read/{this}", "")
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer["run"]


def _wait(store: Any, keys: list[str], wait: timedelta, complaint: str) -> None:
    try:
        if keys:
            store.wait(keys, wait)
    except RuntimeError as error:
        raise ValueError(f"{complaint} within {wait.total_seconds():.0f} s; see the ranks' output") from error


def start_local(command: Sequence[str], devices: Sequence[RankDevice], run_dir: Path) -> None:
    """Run `command` once per rank on this machine through torch's elastic agent and wait for all of them.

    Rank 0 keeps the terminal; every rank writes ``logs/rankN.log``. When one rank fails the others are ended.

    Args:
        devices: one a rank, to name it by.

    Raises:
        ValueError: a rank stopped on a user error; the same text.
        RankFailed: a rank died or raised anything else.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for old in logs.glob("rank*.error"):
        old.unlink()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=len(devices),
        run_id=f"hexiseq-{os.getpid()}-{run_dir.name}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(redirects=Std.NONE, tee=Std.NONE),
        log_line_prefix_template="",
        shutdown_timeout=SHUTDOWN_SECONDS,
    )
    # Between numerical libraries' thread pools and one process a rank, one thread each is the honest default.
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HEXISEQ_PARENT": str(os.getpid())}
    saved = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        raise _explain(error, logs, devices) from None
    except SignalException as error:
        raise Interrupted(error.sigval) from None
    finally:
        testbed.remove()
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _explain(error: Any, logs: Path, devices: Sequence[RankDevice]) -> Exception:
    """The one cause in the agent's report: a user error, else a rank killed or hung, else the first to raise."""
    reports = {int(path.stem.removeprefix("rank")): json.loads(path.read_text()) for path in logs.glob("rank*.error")}
    for _, report in sorted(reports.items()):
        if report["user"]:
            return ValueError(report["message"])

    def name(failed: int) -> str:
        device = devices[failed] if failed < len(devices) else None
        return f"rank {failed}" + (f" ({device.type} on {device.node})" if device else "")

    codes = {failed: failure.exitcode for failed, failure in error.failures.items()}
    first = min(reports, key=lambda failed: reports[failed]["time"], default=None)
    killed = [failed for failed, code in sorted(codes.items()) if code < 0 and code != -signal.SIGTERM]
    # The agent asks the others to end, and kills who does not: a rank killed that late had hung.
    if killed and first is not None and time.time() - reports[first]["time"] >= SHUTDOWN_SECONDS:
        hung = ", ".join(map(name, killed))
        return RankFailed(
            f"{hung} did not answer within the timeout and had to be killed; {name(first)} gave up waiting: "
            f"{reports[first]['message']}\nThe run has ended. Log: {logs / f'rank{killed[0]}.log'}"
        )
    # A killed rank makes its peers fail too, sometimes milliseconds earlier by the clock: the signal is the cause.
    if killed:
        number = signal.Signals(-codes[killed[0]]).name
        return RankFailed(
            f"{name(killed[0])} was killed by {number}; the run has ended. Log: {logs / f'rank{killed[0]}.log'}"
        )
    # Ranks the agent ended are a consequence.
    others = (failed for failed, code in codes.items() if code not in (-signal.SIGTERM, ENDED_CODE))
    failed = first if first is not None else min(others, default=min(codes))
    what = reports[failed]["message"] if failed in reports else f"exit code {codes[failed]}"
    return RankFailed(f"{name(failed)} failed: {what}\nThe run has ended. Log: {logs / f'rank{failed}.log'}")


def worker(main: Callable[[], None], run_dir: Path) -> None:
    """Run one rank's work: its output goes to ``logs/rankN.log`` (rank 0 also keeps the terminal), errors become
    a report the parent can read and an exit code: 2 for a ValueError, 1 for anything else."""
    _die_with_parent()
    _end_at_once_when_asked()
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path = logs / f"rank{rank()}.log"
    if rank() != 0:
        with path.open("a") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", handlers=[logging.FileHandler(path)]
    )
    try:
        main()
    except BaseException as error:  # some of torch's errors are not Exceptions
        text = traceback.format_exc()
        with path.open("a") as file:
            file.write(text)
        user = isinstance(error, ValueError)
        if "HEXISEQ_PARENT" not in os.environ and rank() == 0:
            # No parent of ours reads the report.
            sys.stderr.write(f"error: {error}\n" if user else text)
        message = str(error) if user else f"{type(error).__name__}: {error}"
        (logs / f"rank{rank()}.error").write_text(json.dumps({"user": user, "message": message, "time": time.time()}))
        sys.stdout.flush()
        sys.stderr.flush()
        # Interpreter shutdown can hang in a collective library that still waits for peers.
        os._exit(USER_ERROR_CODE if user else 1)


def settle(devices: Sequence[RankDevice], cores: Sequence[Sequence[int]], berths: Sequence[testbed.Berth]) -> None:
    """Put this CPU rank on its device: quota, network, pinned to its cores, one thread a core; say which device it is.

    Args:
        cores: per rank, the cores it is pinned to; empty leaves it where the system puts it.
        berths: per rank, where `testbed.build` has made room for it.
    """
    import torch

    testbed.enter(berths[rank()])

    mine = cores[rank()]
    usable = sorted(set(mine) & os.sched_getaffinity(0)) if mine and hasattr(os, "sched_setaffinity") else []
    if usable:
        os.sched_setaffinity(0, usable)
    elif mine:
        log.warning("rank %d: cores %s are not available here; not pinned", rank(), list(mine))
    torch.set_num_threads(max(1, len(mine)))
    device = devices[rank()]
    os.environ["HEXISEQ_DEVICE_TYPE"] = device.type
    os.environ["HEXISEQ_NODE"] = device.node


def _end_at_once_when_asked() -> None:
    """A rank that waits inside a collective runs no Python signal handler; a thread of its own ends it all the same."""
    asked = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)

    def end() -> None:
        signal.sigwait(asked)
        os._exit(ENDED_CODE)

    threading.Thread(target=end, name="end", daemon=True).start()


def _die_with_parent() -> None:
    """Ask the kernel to end this rank when the process that started it dies, however it dies (Linux)."""
    parent = os.environ.get("HEXISEQ_PARENT")
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)
