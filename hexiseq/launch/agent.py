"""The process that starts a node's ranks, waits for them and says why they ended.

On several nodes there is one such agent on each. They tell one another when a rank has failed, so that all end within
seconds and one of them, the first, names the cause.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hexiseq import testbed
from hexiseq.doctor import Meeting
from hexiseq.launch.worker import ENDED_CODE, passed_on
from hexiseq.plan import RankDevice

SHUTDOWN_SECONDS = 10  # a rank that has not ended this long after it was asked to is killed
WATCH_SECONDS = 0.5  # between two looks at what other agents say
# After a failure, until every agent has ended its ranks and said how: one that has not answered by then is gone.
ACCOUNT_SECONDS = SHUTDOWN_SECONDS + 5.0
QUICK_SECONDS = 3.0  # the same where srun is ending the job
_FAILED, _SAID = "agents/failed", "agents/said"


class RankFailed(RuntimeError):
    """A rank of a job died or raised; the message names it and says where its log is."""


class Interrupted(RuntimeError):
    """A signal to the process that started the ranks ended the run. ``code`` is the shell's exit code for it."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; all ranks have stopped")
        self.code = 128 + number


@dataclass(frozen=True)
class Agents:
    """One agent a node, which start the ranks of a job together.

    Attributes:
        meeting: of the agents.
        ranks: how many each starts; they are numbered agent by agent.
        nodes: the host of each.
        address: of the first agent, which hosts the ranks' rendezvous at `port`.
    """

    meeting: Meeting
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    address: str
    port: int

    @property
    def number(self) -> int:
        return self.meeting.rank

    @property
    def first(self) -> int:
        """The first rank of this agent."""
        return sum(self.ranks[: self.number])


def start_ranks(
    command: Sequence[str], devices: Sequence[RankDevice], run_dir: Path, agents: Agents | None = None
) -> None:
    """Run `command` once per rank of this node through torch's elastic agent and wait for all of them.

    Rank 0 keeps the terminal; every rank writes ``logs/rankN.log``. When one rank fails the others are ended, on all
    nodes.

    Args:
        devices: one a rank of the whole job, to name it by.
        agents: those of several nodes; None: this one alone, which starts a rank for each device.

    Raises:
        ValueError: a rank stopped on a user error; the same text.
        RankFailed: a rank died or raised anything else, or an agent is gone.
        Interrupted: a signal ended this agent.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    first, own, nodes = 0, len(devices), 1
    rendezvous: dict[str, Any] = {"run_id": f"hexiseq-{os.getpid()}-{run_dir.name}", "rdzv_backend": "c10d",
                                  "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}  # fmt: skip
    if agents is not None:
        first, own, nodes = agents.first, agents.ranks[agents.number], len(agents.ranks)
        # The one kind in which ranks are numbered in the agents' order.
        rendezvous = {"run_id": f"hexiseq-{run_dir.name}", "rdzv_backend": "static",
                      "rdzv_endpoint": f"{agents.address}:{agents.port}",
                      "rdzv_configs": {"rank": agents.number}}  # fmt: skip
    for number in range(first, first + own):
        (logs / f"rank{number}.error").unlink(missing_ok=True)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=own,
        max_restarts=0,
        monitor_interval=0.2,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(redirects=Std.NONE, tee=Std.NONE),
        log_line_prefix_template="",
        shutdown_timeout=SHUTDOWN_SECONDS,
        **rendezvous,
    )
    # Between numerical libraries' thread pools and one process a rank, one thread each is the honest default.
    environment = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "HEXISEQ_PARENT": str(os.getpid()),
                   **passed_on()}  # fmt: skip
    if devices[first].kernel == "cpu":
        # PyTorch reads it once: blocks of 2 MB and more come in huge pages, where the system has any.
        environment["THP_MEM_ALLOC_ENABLE"] = os.environ.get("THP_MEM_ALLOC_ENABLE", "1")
    saved = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    watch = _Watch(agents) if agents else None
    try:
        elastic_launch(config, command[0])(*command[1:])
    except ChildFailedError as error:
        codes = {failed: failure.exitcode for failed, failure in error.failures.items()}
        raise _explain(*_gather(codes, logs, watch), logs, devices) from None
    except SignalException as error:
        if watch is not None:
            seconds = ACCOUNT_SECONDS if watch.heard else QUICK_SECONDS
            found = _gather(watch.killed(logs), logs, watch, seconds)
            # What ends a job of Slurm's is somebody, or srun, to whom an agent is lost.
            if found[2] or (watch.heard and any(found)):
                raise _explain(*found, logs, devices) from None
        raise Interrupted(error.sigval) from None
    finally:
        if watch is not None:
            watch.stop()
        testbed.remove()
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Watch:
    """Ends this agent's ranks when another agent's have failed: its peers would wait for a rank that is no more."""

    def __init__(self, agents: Agents) -> None:
        self.agents, self.heard, self._heard_at = agents, False, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            try:
                failed = self.agents.meeting.posted(_FAILED)
            except RuntimeError:  # the first agent, which hosts the store, is gone
                failed = True
            if failed:
                self.heard, self._heard_at = True, time.monotonic()
                os.kill(os.getpid(), signal.SIGTERM)  # torch's agent ends its ranks on it
                return

    def killed(self, logs: Path) -> dict[int, int]:
        """Own ranks that had to be killed after others failed: they did not end when they were asked to."""
        if not self.heard or time.monotonic() - self._heard_at < SHUTDOWN_SECONDS:
            return {}
        own = range(self.agents.first, self.agents.first + self.agents.ranks[self.agents.number])
        return {rank: -signal.SIGKILL for rank in own if not (logs / f"rank{rank}.error").exists()}

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def _gather(
    codes: Mapping[int, int], logs: Path, watch: _Watch | None, seconds: float = ACCOUNT_SECONDS
) -> tuple[dict[int, int], dict[int, dict[str, Any]], list[str]]:
    """Exit codes and reports of the failed ranks, by rank, and the nodes whose agent does not answer."""
    own = {}
    for path in logs.glob("rank*.error"):
        number = int(path.stem.removeprefix("rank"))
        report = json.loads(path.read_text())
        if "ended" not in report:
            own[number] = report
    if watch is None:
        return dict(codes), own, []
    watch.stop()
    agents = watch.agents
    first, count = agents.first, agents.ranks[agents.number]
    mine = {"codes": codes, "reports": {r: own[r] for r in own if first <= r < first + count}}
    try:
        agents.meeting.post(_FAILED, None)
        agents.meeting.post(f"agents/{agents.number}", mine)
        gone = agents.meeting.missing([f"agents/{n}" for n in range(len(agents.ranks))], seconds)
        accounts = [agents.meeting.read(f"agents/{n}") for n in range(len(agents.ranks)) if f"agents/{n}" not in gone]
    except RuntimeError:
        gone, accounts = ["agents/0"], [mine]
    # Keys were numbers; JSON has made texts of them.
    all_codes = {int(rank): code for account in accounts for rank, code in account["codes"].items()}
    reports = {int(rank): report for account in accounts for rank, report in account["reports"].items()}
    return all_codes, reports, [agents.nodes[int(name.removeprefix("agents/"))] for name in gone]


def _explain(
    codes: Mapping[int, int],
    reports: Mapping[int, Mapping[str, Any]],
    gone: Sequence[str],
    logs: Path,
    devices: Sequence[RankDevice],
) -> Exception:
    """The one cause among what agents report: a user error, else a rank killed or hung, else the first to raise."""
    for _, report in sorted(reports.items()):
        if report["user"]:
            return ValueError(report["message"])

    def name(failed: int) -> str:
        device = devices[failed] if failed < len(devices) else None
        return f"rank {failed}" + (f" ({device.type} on {device.node})" if device else "")

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
    if gone:
        return RankFailed(
            f"nothing is heard of {', '.join(gone)}: the node, or what started its ranks, is gone; the run has ended"
        )
    # Ranks the agent ended are a consequence.
    others = (failed for failed, code in codes.items() if code not in (-signal.SIGTERM, ENDED_CODE))
    failed = first if first is not None else min(others, default=min(codes))
    what = reports[failed]["message"] if failed in reports else f"exit code {codes[failed]}"
    return RankFailed(f"{name(failed)} failed: {what}\nThe run has ended. Log: {logs / f'rank{failed}.log'}")


def say_last(agents: Agents, said: bool) -> bool:
    """Before agents end on an error: the first has the last word, which the others wait for, and it for them.

    Args:
        said: this agent has printed why.

    Returns:
        Whether the first agent has.
    """
    try:
        if said:
            agents.meeting.post(_SAID, None)
        elif agents.meeting.missing([_SAID], ACCOUNT_SECONDS):
            return False
        agents.meeting.leave()
    except RuntimeError:
        return said
    return True
