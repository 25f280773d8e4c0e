"""Whether the ranks of a job can work together: what each of them is, compared before the accelerator's process group
exists, since that is where a mismatch hangs.

Ranks meet at the rendezvous store: every wait ends after its timeout and names who is missing, and all ranks hear the
same words.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hexiseq.plan import align

if TYPE_CHECKING:
    import torch

NONE = "none"
# What may follow a device's name and is the same product: form factor, memory, and the id we add.
_SAME_PRODUCT = re.compile(r"(?:[ -](?:SXM\d*|OAM|HBM\d\w*|\d+GB|GPU-[0-9a-f-]+))*", re.IGNORECASE)
# Fields whose difference is known to hang or corrupt a job, and why.
_FATAL = {
    "hexiseq": "other versions exchange other messages",
    "torch": "other versions run other collectives",
    "nccl": "NCCL of different versions hangs or returns wrong sums",
    "cuda_major": "communicators across CUDA versions hang",
}
_NOTED = {"cuda": "CUDA", "cudnn": "cuDNN", "driver": "driver", "python": "Python", "cpu": "host CPU",
          "dtypes": "dtypes"}  # fmt: skip
_UNLIKE_GPUS_NCCL = (2, 21)  # older ones may choose another algorithm on each kind of GPU
_LEAST_DRIVER = {"12": "525.60.13", "13": "580.65.06"}  # of NVIDIA on Linux, by CUDA's major version
BUSY_GB = 2.0  # of a GPU's memory that this rank has not taken; its own context is about 0.5 GB
MOST_SKEW_SECONDS = 3.0  # between the clocks of nodes; ranks of one busy node look up to a second apart
_LAST_WORDS_SECONDS = 5.0  # that rank 0, who may host the store, waits for the others to have read why it ends
_visits = itertools.count()


def recognise(reported: str, names: Mapping[str, Sequence[str]]) -> str | None:
    """The device type a driver's name stands for: the longest of its names that is there in whole words.

    What follows may be form factor and memory only: an ``H200`` is not an ``H200 NVL``, nor a slice of it. None where
    no name, or names of two types, fit best: such a device must be measured.

    Args:
        reported: as CUDA or ROCm report it.
        names: device type -> what the driver calls it.
    """
    found: dict[str, int] = {}
    for kind, known in names.items():
        for name in known:
            for match in re.finditer(rf"(?<![a-z0-9]){re.escape(name)}(?![a-z0-9])", reported, re.IGNORECASE):
                if _SAME_PRODUCT.fullmatch(reported[match.end() :]):
                    found[kind] = max(found.get(kind, 0), len(name))
    longest = max(found.values(), default=0)
    best = [kind for kind, length in found.items() if length == longest]
    return best[0] if len(best) == 1 else None


def driver_name(device: torch.device) -> str:
    """What the driver calls a GPU, and which one it is, so that a cluster can name a single one; ``cpu`` of a CPU."""
    import torch

    if device.type != "cuda":
        return device.type
    name, unique = torch.cuda.get_device_properties(device).name, _unique(device)
    return name if unique == NONE else f"{name} GPU-{unique}"


@dataclass(frozen=True)
class Report:
    """What a rank is and runs on. Versions are texts, ``none`` where there is none.

    Attributes:
        capability: compute capability of the GPU.
        gpu: the one GPU in the world that it is.
        used_gb: of its memory, by anyone but this rank's tensors.
    """

    rank: int
    node: str
    device: str
    hexiseq: str
    torch: str
    cuda: str
    cudnn: str
    nccl: str
    driver: str
    python: str
    cpu: str
    dtypes: tuple[str, ...]
    capability: str
    gpu: str
    used_gb: float

    @property
    def cuda_major(self) -> str:
        return self.cuda.split(".")[0]

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.device} on {self.node})"


def examine(device: torch.device, rank: int) -> Report:
    """This rank's report. `device` and node are what the launcher says they are, else the driver's and the host's."""
    import torch

    import hexiseq

    on_gpu = device.type == "cuda"
    has_bf16 = not on_gpu or bool(torch.version.hip) or torch.cuda.get_device_capability(device) >= (8, 0)
    return Report(
        rank=rank,
        node=os.environ.get("HEXISEQ_NODE", socket.gethostname()),
        device=os.environ.get("HEXISEQ_DEVICE_TYPE", driver_name(device)),
        hexiseq=hexiseq.__version__,
        torch=torch.__version__,
        cuda=f"hip {torch.version.hip}" if torch.version.hip else torch.version.cuda or NONE,
        cudnn=str(torch.backends.cudnn.version() or NONE),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else NONE,
        driver=_driver(),
        python=platform.python_version(),
        cpu=processor(),
        dtypes=(*(["bfloat16"] if has_bf16 else []), "float16", "float32", "float64"),
        capability=".".join(map(str, torch.cuda.get_device_capability(device))) if on_gpu else NONE,
        gpu=_unique(device) if on_gpu else NONE,
        used_gb=_used_gb(device) if on_gpu else 0.0,
    )


def findings(reports: Sequence[Report], dtype: str | None = None) -> tuple[list[str], list[str]]:
    """What is known to hang or corrupt a job of these ranks, and what merely differs; a line each, none if all is well.

    Args:
        dtype: the job's, which every rank must be able to run; None: not known yet.
    """
    fatal = [
        f"{field.replace('_', ' ')}: {_by_value(reports, field)}; {why}"
        for field, why in _FATAL.items()
        if _differs(reports, field)
    ]
    if dtype is not None and (unable := [report for report in reports if dtype not in report.dtypes]):
        fatal.append(f"dtype: {_ranks(unable)} cannot run the job's {dtype}; choose another with strategy.dtype")
    fatal += [*_shared_gpus(reports), *_old_nccl(reports)]
    noted = [
        f"{name} differs: {_by_value(reports, field)}" for field, name in _NOTED.items() if _differs(reports, field)
    ]
    return fatal, [*noted, *_old_drivers(reports), *_busy_gpus(reports)]


def _shared_gpus(reports: Sequence[Report]) -> list[str]:
    users: dict[str, list[Report]] = {}
    for report in reports:
        users.setdefault(report.gpu, []).append(report)
    users.pop(NONE, None)
    return [
        f"GPU {gpu}: {_ranks(sharing)} all run on it; give every rank one of its own (CUDA_VISIBLE_DEVICES, or the "
        "launcher's ranks a node)"
        for gpu, sharing in users.items()
        if len(sharing) > 1
    ]


def _old_nccl(reports: Sequence[Report]) -> list[str]:
    nvidia = [report for report in reports if report.nccl != NONE and not report.cuda.startswith("hip")]
    old = [report for report in nvidia if _numbers(report.nccl)[:2] < _UNLIKE_GPUS_NCCL]
    if not old or not _differs(nvidia, "capability"):
        return []
    least = ".".join(map(str, _UNLIKE_GPUS_NCCL))
    return [f"nccl: {_by_value(old, 'nccl')}; compute capabilities differ ({_by_value(nvidia, 'capability')}), and "
            f"between unlike GPUs NCCL before {least} hangs"]  # fmt: skip


def _old_drivers(reports: Sequence[Report]) -> list[str]:
    old: dict[str, list[Report]] = {}
    for report in reports:
        least = _LEAST_DRIVER.get(report.cuda_major)
        if least and NONE not in (report.driver, report.gpu) and _numbers(report.driver) < _numbers(least):
            old.setdefault(least, []).append(report)
    return [f"driver is older than CUDA {group[0].cuda} asks for, {least}: {_by_value(group, 'driver')}"
            for least, group in old.items()]  # fmt: skip


def _busy_gpus(reports: Sequence[Report]) -> list[str]:
    busy = [report for report in reports if report.used_gb > BUSY_GB]
    if not busy:
        return []
    used = ", ".join(f"{report.used_gb:.1f} GB on {report.who}" for report in busy[:3])
    more = f" and on {len(busy) - 3} more" if len(busy) > 3 else ""
    return [f"GPU memory is in use already: {used}{more}"]


def table(reports: Sequence[Report]) -> list[str]:
    """A row for each rank, with the versions that matter; those that are the same everywhere in one line above."""
    apart = ("rank", "node", "device", "gpu", "used_gb")
    fields = [field.name for field in dataclasses.fields(Report) if field.name not in apart]
    shared = [field for field in fields if not _differs(reports, field)]
    header = ["rank", "node", "device", *(field for field in fields if field not in shared)]
    rows = [[_text(getattr(report, field)) for field in header] for report in reports]
    same = ", ".join(f"{field} {_text(getattr(reports[0], field))}" for field in shared)
    return [f"on all ranks: {same}", *align(header, rows)]


class Meeting:
    """Where ranks exchange small values and learn who does not come. All ranks must call it in the same order.

    Args:
        store: of torch.distributed; ranks reach it before there is a process group.
        timeout_seconds: of every wait.
        who: what to call a rank in messages.

    Attributes:
        heard: rank 0 has told this one why all end, and so says it itself.
    """

    def __init__(
        self, store: Any, rank: int, ranks: int, timeout_seconds: float, who: Callable[[int], str] = "rank {}".format
    ) -> None:
        self.rank, self.ranks, self.who = rank, ranks, who
        self._store, self._timeout, self._number = store, timeout_seconds, itertools.count()
        self.heard = False

    def gather(self, what: str, value: Any, spent_seconds: float = 0.0) -> list[Any]:
        """Every rank's `value`, by rank; plain containers.

        Args:
            what: what ranks are doing, for the message.
            spent_seconds: of the timeout, on what came before.

        Raises:
            ValueError: on all ranks that are there, with the same text, naming those that are not.
        """
        place = f"{next(self._number)}"
        left = max(self._timeout - spent_seconds, 0.0)
        self._store.set(f"{place}/{self.rank}", json.dumps(value))
        if self.rank == 0:
            missing = self._missing(place, range(self.ranks), left)
            answer: dict[str, Any] = {"missing": missing}
            if not missing:
                texts = self._store.multi_get([f"{place}/{rank}" for rank in range(self.ranks)])
                answer["values"] = [json.loads(text) for text in texts]
            self._store.set(f"{place}/all", json.dumps(answer))
        else:
            silent = self._missing(place, ["all"], left + _LAST_WORDS_SECONDS)
            if silent and self._store.check([f"{place}/0"]):  # it came late, and waits for others as long as it may
                silent = self._missing(place, ["all"], self._timeout)
            answer = {"missing": [0]} if silent else json.loads(self._store.get(f"{place}/all"))
        if answer["missing"]:
            names = ", ".join(self.who(rank) for rank in answer["missing"])
            self.heard = answer["missing"] != [0]
            self.leave()
            raise ValueError(f"{what}: {names} did not answer within {self._timeout:g} s; see its log, or leave it out")
        return answer["values"]

    def share(self, make: Callable[[], Any] | None) -> Any:
        """What rank 0 makes, to all; plain containers.

        Args:
            make: called on rank 0 alone. Its ValueError reaches all.

        Raises:
            ValueError: on all ranks, what `make` raised; or rank 0 gave nothing in time.
        """
        place = f"{next(self._number)}"
        if self.rank == 0:
            assert make is not None
            answer: dict[str, Any] = {"error": "rank 0 failed; see its output"}
            try:
                answer = {"value": make()}
            except ValueError as error:
                answer = {"error": str(error)}
                raise
            finally:
                self._store.set(f"{place}/made", json.dumps(answer))
                if "error" in answer:
                    self.leave()
            return answer["value"]
        if self._missing(place, ["made"], self._timeout):
            raise ValueError(f"{self.who(0)} did not answer within {self._timeout:g} s; see its output")
        answer = json.loads(self._store.get(f"{place}/made"))
        if "error" in answer:
            self.heard = True
            self.leave()
            raise ValueError(answer["error"])
        return answer["value"]

    def post(self, name: str, value: Any) -> None:
        """Leave a value, a plain container, for whoever looks; a name is used once."""
        self._store.set(f"post/{name}", json.dumps(value))

    def posted(self, name: str) -> bool:
        """Whether somebody has left a value of that name. Raises RuntimeError where the store is gone."""
        return self._store.check([f"post/{name}"])

    def read(self, name: str) -> Any:
        """The value somebody has left."""
        return json.loads(self._store.get(f"post/{name}"))

    def missing(self, names: Sequence[str], seconds: float) -> list[str]:
        """Those of `names` that nobody leaves a value for within the time."""
        return self._missing("post", names, seconds)

    def leave(self) -> None:
        """Before ending on an error: rank 0, who may host the store, stays until the others know why."""
        self._store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            self._missing("left", range(self.ranks), min(self._timeout, _LAST_WORDS_SECONDS))

    def blame(self, what: str, error: Exception) -> ValueError:
        """After a collective failed: those ranks that do not say so themselves are the ones the others waited for."""
        self._store.set(f"failed/{self.rank}", "")
        # Whether another one failed shows within a moment of its own timeout.
        missing = self._missing("failed", range(self.ranks), min(self._timeout, _LAST_WORDS_SECONDS))
        names = ", ".join(self.who(rank) for rank in missing)
        if not names:
            return ValueError(f"{what} failed on all ranks: {error}")
        return ValueError(f"{what}: {names} did not answer within {self._timeout:g} s; see its log, or leave it out")

    def _missing(self, place: str, names: Sequence[Any], seconds: float) -> list[Any]:
        """Names under `place` that nobody has set within the time."""
        try:
            self._store.wait([f"{place}/{name}" for name in names], timedelta(seconds=seconds))
        except RuntimeError:
            return [name for name in names if not self._store.check([f"{place}/{name}"])]
        return []


@dataclass(frozen=True)
class Comparison:
    """What ranks that can work together have said.

    Attributes:
        reports: by rank.
        noted: what differs, or is odd, without being known to do harm; a line each.
        skew_seconds: between the clocks of the first node and the last; ranks answer within some hundredths of it.
    """

    reports: tuple[Report, ...]
    noted: tuple[str, ...]
    skew_seconds: float


def check(meeting: Meeting, report: Report, dtype: str | None = None) -> Comparison:
    """Compare all ranks' reports and clocks. Collective.

    Raises:
        ValueError: on all ranks, with the same text: a mismatch known to hang or corrupt, or ranks that did not come.
    """
    gathered = meeting.gather("comparing the ranks' software", dataclasses.asdict(report))
    reports = [Report(**{**entry, "dtypes": tuple(entry["dtypes"])}) for entry in gathered]
    fatal, noted = findings(reports, dtype)
    if fatal:
        meeting.leave()
        raise ValueError("\n".join(["the ranks of this job cannot work together:", *(f"  {line}" for line in fatal),
                                    "put that right on those ranks, or leave them out"]))  # fmt: skip
    # All ranks have just heard the same answer, so they read their clocks at nearly one time.
    clocks: dict[str, float] = {}
    for said, seconds in zip(reports, meeting.gather("comparing clocks", time.time()), strict=True):
        clocks[said.node] = min(seconds, clocks.get(said.node, seconds))  # ranks can only be late
    slow, fast = min(clocks, key=clocks.__getitem__), max(clocks, key=clocks.__getitem__)
    skew = clocks[fast] - clocks[slow]
    if skew > MOST_SKEW_SECONDS:
        noted.append(f"clocks differ: that of {fast} is {skew:.1f} s ahead of {slow}'s, so times in logs mislead")
    return Comparison(tuple(reports), tuple(noted), skew)


def reach_store(host: str, port: int, rank: int, timeout_seconds: float) -> Any:
    """The job's rendezvous store, under a name no other visit has.

    Hold on to it until the process group exists: where no launcher hosts the store, rank 0 does.

    Raises:
        ValueError: nobody answers at the address.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        base = dist.distributed_c10d._get_default_store()
    else:
        hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host_here = rank == 0 and not hosted
        wait = timedelta(seconds=timeout_seconds)
        try:
            # Not by `rendezvous`: it waits for all ranks and does not say which of them are missing.
            base = dist.TCPStore(host, port, None, host_here, wait, wait_for_workers=False, multi_tenant=not hosted)
        except RuntimeError as error:
            if host_here:
                reason = "it is in use" if "address already in use" in str(error) else str(error).splitlines()[0]
                raise ValueError(f"rank 0 cannot open port {port} of {host}: {reason}") from error
            raise ValueError(f"rank {rank}: rank 0 did not answer at {host}:{port} within {timeout_seconds:g} s; "
                             "see the ranks' output") from error  # fmt: skip
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"hexiseq/doctor/{attempt}/{next(_visits)}", base)


def _differs(reports: Sequence[Report], field: str) -> bool:
    return len({getattr(report, field) for report in reports}) > 1


def _by_value(reports: Sequence[Report], field: str) -> str:
    groups: dict[Any, list[Report]] = {}
    for report in reports:
        groups.setdefault(getattr(report, field), []).append(report)
    # The odd ones out come first.
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0].rank))
    return ", ".join(f"{_text(value)} on {_ranks(members)}" for value, members in ordered)


def _ranks(reports: Sequence[Report]) -> str:
    """Names of a few ranks, the number of many."""
    shown = ", ".join(report.who for report in reports[:3])
    return shown if len(reports) <= 3 else f"{shown} and {len(reports) - 3} more"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _unique(device: torch.device) -> str:
    """UUID of a GPU."""
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", NONE))


def _used_gb(device: torch.device) -> float:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    return (total - free - torch.cuda.memory_reserved(device)) / 1e9


def _text(value: Any) -> str:
    return "+".join(value) if isinstance(value, tuple) else str(value)


def _driver() -> str:
    """Version of NVIDIA's kernel module, or of AMD's."""
    for path, pattern in (
        ("/proc/driver/nvidia/version", r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)"),
        ("/sys/module/amdgpu/version", r"(\S+)"),
    ):
        if Path(path).is_file() and (found := re.search(pattern, Path(path).read_text())):
            return found[1]
    return NONE


def processor() -> str:
    """Model of the host's CPU."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
