"""One rank: its log, its signals, its place on the machine, and how its errors reach those who started it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from hexiseq import testbed
from hexiseq.doctor import Meeting
from hexiseq.launch import slurm
from hexiseq.plan import RankDevice

log = logging.getLogger(__name__)

USER_ERROR_CODE = 2
ENDED_CODE = 128 + signal.SIGTERM
STAY_SECONDS = 3.0
STOP_SIGNAL = signal.SIGUSR1  # asks a run to keep what it has and end
_ASKED_BEFORE = "HEXISEQ_ASKED_TO_STOP"
_asked: list[int] = []


def rank() -> int:
    """Global rank of this process; 0 where nothing was launched."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Ranks the launcher started."""
    return int(os.environ["WORLD_SIZE"])


def worker(
    main: Callable[[], None],
    run_dir: Path,
    devices: Sequence[RankDevice] = (),
    meeting: Meeting | None = None,
) -> None:
    """Run one rank's work: its output goes to ``logs/rankN.log`` (rank 0 also keeps the terminal), errors become
    a report the parent can read and an exit code: 2 for a ValueError, 1 for anything else.

    Args:
        devices: one a rank, to name it by.
        meeting: of all ranks, where no agent of ours sees which of them has hung.
    """
    _die_with_parent()
    # All that is imported by now stays.
    gc.freeze()
    gc.enable()
    logs = run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path, report = logs / f"rank{rank()}.log", logs / f"rank{rank()}.error"
    _end_at_once_when_asked(report)
    listen()
    terminal = os.dup(sys.stderr.fileno())
    if rank() != 0:
        with path.open("a") as file:
            os.dup2(file.fileno(), sys.stdout.fileno())
            os.dup2(file.fileno(), sys.stderr.fileno())
    kind = devices[rank()].type if devices else "device"
    who = f"rank {rank()} ({kind} on {socket.gethostname()})"
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {who} %(name)s: %(message)s", handlers=[logging.FileHandler(path)]
    )
    try:
        main()
    except BaseException as error:  # some of torch's errors are not Exceptions
        text = traceback.format_exc()
        with path.open("a") as file:
            file.write(text)
        user = isinstance(error, ValueError)
        message = str(error) if user else f"{type(error).__name__}: {error}"
        if meeting is not None and isinstance(error, Exception) and not user:
            message = f"{message}\n{meeting.blame('training', error)}"
        report.write_text(json.dumps({"user": user, "message": message, "time": time.time()}))
        sys.stdout.flush()
        sys.stderr.flush()
        if "HEXISEQ_PARENT" not in os.environ and (rank() == 0 or not user):
            # No parent of ours reads the report. A user's mistake is every rank's, with one text.
            last = f"error: {error}" if user else f"error: {who} failed: {message}\nLog: {path}"
            os.write(terminal, f"{last}\n".encode())
        if "HEXISEQ_PARENT" not in os.environ:
            stay(USER_ERROR_CODE if user else 1, first=rank() == 0)
        # Interpreter shutdown can hang in a collective library that still waits for peers.
        os._exit(USER_ERROR_CODE if user else 1)


def stay(code: int, first: bool) -> None:
    """Before one of several processes ends with an error: not before the first of them, which says why, has ended.

    ``srun`` ends all when one ends badly, and counts the largest code.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(code))
    if not first:
        time.sleep(STAY_SECONDS)


def settle(devices: Sequence[RankDevice], cores: Sequence[Sequence[int]], berths: Sequence[testbed.Berth]) -> None:
    """Put this rank on its device: quota, network, pinned to its cores, one thread a core; say which device it is.

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
    device = devices[rank()]
    if device.kernel == "cpu":
        prepare_cpu()
    torch.set_num_threads(max(1, len(mine)))
    os.environ["HEXISEQ_DEVICE_TYPE"] = device.type
    os.environ["HEXISEQ_NODE"] = device.node


def prepare_cpu() -> None:
    """Set this process up as a rank on CPUs; to be called before its first process group.

    **It wakes quietly**: a thread that wakes does not interrupt one that runs (`SCHED_BATCH`, `sched(7)`). The thread
    of gloo that talks to a peer spins while another one holds that connection's lock. Woken by a message it would take
    the core from just that one, until its time slice ends: on ranks that share a core, or have one, a message takes 0.1
    to 0.3 ms instead of 2 to 4.

    **It keeps memory** that is freed (glibc's `mallopt(3)`), as a GPU's allocator does. Else that of large tensors goes
    back to the system, and comes again page by page, zeroed: some ten thousand pages a step (``docs/testbed.md``).
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    keep_memory()


def keep_memory() -> None:
    """Keep what is freed, of blocks below 32 MB. Larger ones are mapped one by one and given back: kept they would be
    many, as a small block that takes a piece of one keeps the next from fitting.

    Nothing is done in another C library.
    """
    trim_threshold, map_threshold = -1, -3
    with contextlib.suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(trim_threshold, -1)  # never
        mallopt(map_threshold, 2**25)


def hold_signals() -> None:
    """Let requests to stop wait until a rank listens; to be called first by what starts ranks.

    Slurm sends them to every process of a step. They are blocked in the processes this one starts, too, until those
    listen; what comes before there are any is passed on (`passed_on`).
    """
    # Threads that are there already do not block it.
    signal.signal(STOP_SIGNAL, _note)
    atexit.register(signal.signal, STOP_SIGNAL, signal.SIG_IGN)  # Python puts back the default, which ends a process
    signal.pthread_sigmask(signal.SIG_BLOCK, {STOP_SIGNAL})


def listen() -> None:
    """Note requests to stop from now on, those that were held back among them."""

    if os.environ.get(_ASKED_BEFORE) == "1":
        _asked.append(STOP_SIGNAL)
    signal.signal(STOP_SIGNAL, _note)
    atexit.register(signal.signal, STOP_SIGNAL, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {STOP_SIGNAL})


def passed_on() -> dict[str, str]:
    """What the environment of ranks that are about to start must say of requests to stop that came before them."""
    return {_ASKED_BEFORE: str(int(asked_to_stop() or STOP_SIGNAL in signal.sigpending()))}


def _note(number: int, _: FrameType | None) -> None:
    _asked.append(number)


def asked_to_stop() -> bool:
    """Whether this rank has got `STOP_SIGNAL`: Slurm's warning that the time is up or somebody else comes first."""
    return bool(_asked)


def requeue() -> None:
    """Say how a run that was asked to stop goes on; a Slurm job is put back into the queue. Rank 0's alone."""
    job = slurm.job_id()
    if job is None:
        print("stopped as asked; go on with ckpt_path=auto and the same run folder", flush=True)
        return
    # Said before: Slurm ends this process as soon as it has put the job back.
    print(f"stopped as asked; job {job} goes back into the queue", flush=True)
    if (reason := slurm.requeue()) is not None:
        print(f"job {job} was not put back into the queue ({reason}): submit it again with ckpt_path=auto and the "
              "same run folder", flush=True)  # fmt: skip


def _end_at_once_when_asked(report: Path) -> None:
    """A rank that waits inside a collective runs no Python signal handler; a thread of its own ends it all the same.

    It says so in its report, which tells it from a rank that has hung.
    """
    asked = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, asked)
    # To srun the largest code counts, which is to be that of the rank that failed.
    code = ENDED_CODE if "HEXISEQ_PARENT" in os.environ else 1

    def end() -> None:
        signal.sigwait(asked)
        if not report.exists():
            report.write_text(json.dumps({"ended": True}))
        os._exit(code)

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
