"""Measure the ranks, compare them, describe them as a cluster: ``python -m recipes.profile RUN_DIR`` in every rank.

Without a run folder it is the quick measurement of `recipes.job.detect`: a request on stdin, a cluster on stdout.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import re
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from hexiseq import launch, testbed
from hexiseq.cluster import Cluster, Device, device_from_config
from hexiseq.plan import DTYPES, RankDevice
from hexiseq.workload import ModelShape
from recipes.job import CONF, Config, make_folder, missing_gpus

CLUSTERS = CONF / "cluster"
MOST_CPU_RANKS = 4  # where no cluster says how many
# What `python train.py` spends on a machine it has not seen.
# It tells devices apart less finely than a longer measurement does.
QUICK = {"name": "profile", "seconds": 4, "link_seconds": 2, "alike": 0.15, "timeout_seconds": 60, "save": None,
         "overwrite": False}  # fmt: skip
MOST_SECONDS = 3600


@dataclass(frozen=True)
class Job:
    """A prepared measurement.

    Attributes:
        config: the resolved configuration.
        devices: type and node of each rank, as far as they are known before it starts.
        cores, quotas, berths: per rank, where the cluster puts it; empty where no CPU cluster is given.
        on_gpus: the ranks are GPUs.
        saved: where the cluster goes beside the run folder; None: nowhere.
        quiet: print nothing; the cluster's file is what counts.
    """

    config: Config
    run_dir: Path
    devices: tuple[RankDevice, ...]
    cores: tuple[tuple[int, ...], ...]
    quotas: tuple[float | None, ...]
    berths: tuple[testbed.Berth, ...]
    on_gpus: bool
    saved: Path | None
    quiet: bool

    @property
    def world_size(self) -> int:
        return len(self.devices)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "run_dir": str(self.run_dir), "saved": self.saved and str(self.saved)}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Job:
        return Job(
            config=dict(data["config"]),
            run_dir=Path(data["run_dir"]),
            devices=tuple(RankDevice(**device) for device in data["devices"]),
            cores=tuple(tuple(cores) for cores in data["cores"]),
            quotas=tuple(data["quotas"]),
            berths=tuple(testbed.Berth(**berth) for berth in data["berths"]),
            on_gpus=data["on_gpus"],
            saved=Path(data["saved"]) if data["saved"] else None,
            quiet=data["quiet"],
        )


def prepare(
    config: Config,
    run_dir: Path,
    *,
    members: Sequence[launch.Member] | None = None,
    ranks: int | None = None,
    quiet: bool = False,
) -> Job:
    """Find out which ranks there will be and write the run folder's files.

    Args:
        members: the ranks a launcher has started already or is about to.
        ranks: wanted on this machine; None: those of the cluster, else one for each GPU, or each CPU core up to
            `MOST_CPU_RANKS`.

    Raises:
        ValueError: anything the user can put right, before any process starts.
    """
    _check(config)
    ranks = ranks if members is None else len(members)
    cluster = Cluster.from_config(config["cluster"]) if config.get("cluster") else None
    devices: tuple[RankDevice, ...]
    if cluster is None:
        gpus = _gpus()
        most = gpus or None
        count = ranks or gpus or min(len(os.sched_getaffinity(0)), MOST_CPU_RANKS)
        devices = (RankDevice("gpu" if gpus else "cpu", "this machine", "auto"),) * count
        on_gpus = gpus > 0
    else:
        if missing_gpus(cluster):
            raise ValueError(f"recipe=profile measures real devices: cluster {cluster.name!r} has GPUs, this machine "
                             "has none; leave +cluster out to measure what there is")  # fmt: skip
        if ranks is not None and ranks != len(cluster.places):
            raise ValueError(f"the launcher started {ranks} ranks, cluster {cluster.name!r} has {len(cluster.places)} "
                             "devices; start as many ranks as devices, or leave +cluster out")  # fmt: skip
        devices = tuple(RankDevice(p.device.type, p.node_name, p.device.kernel) for p in cluster.places)
        on_gpus = any(device.vendor != "cpu" for device in cluster.devices)
        most = _gpus() if on_gpus else None
    if most is not None and members is None and len(devices) > most:
        raise ValueError(f"{len(devices)} ranks are wanted, this machine has {most} GPUs; start them on all nodes with "
                         "torchrun or srun, or measure fewer")  # fmt: skip
    places = cluster.places if cluster and not on_gpus else ()
    saved = _saved(config["recipe"])
    make_folder(run_dir)
    job = Job(
        config,
        run_dir,
        devices,
        cores=tuple(place.seat.cores for place in places),
        quotas=tuple(place.seat.quota for place in places),
        berths=testbed.build(places, cluster.namespaces) if cluster and places else (),
        on_gpus=on_gpus,
        saved=saved,
        quiet=quiet,
    )
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (run_dir / "job.json").write_text(json.dumps(job.to_dict()))
    return job


def announce(job: Job) -> None:
    recipe = job.config["recipe"]
    print(
        f"measuring {job.world_size} ranks, about {recipe['seconds'] + recipe['link_seconds']:g} s; "
        f"run folder: {job.run_dir}",
        flush=True,
    )


def run(job: Job) -> None:
    """Measure. Called on every rank, with the launcher's environment set."""
    import torch
    import torch.distributed as dist

    from hexiseq import doctor
    from hexiseq.profile import cache, describe, measure_links, measured, set_up, time_calls

    rank, ranks, recipe = launch.rank(), launch.world_size(), job.config["recipe"]
    free_cores = sorted(os.sched_getaffinity(0))
    device = _settle(job)
    seconds = recipe["timeout_seconds"]
    timeout = datetime.timedelta(seconds=seconds)
    store = doctor.reach_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, seconds)
    meeting = doctor.Meeting(store, rank, ranks, seconds)

    wanted = job.config["strategy"]["dtype"]
    compared = doctor.check(meeting, doctor.examine(device, rank), None if wanted == "auto" else wanted)
    reports = compared.reports
    meeting.who = lambda other: reports[other].who
    if rank == 0 and not job.quiet:
        print("\n".join([*doctor.table(reports), *(f"NOTE: {line}" for line in compared.noted)]), flush=True)
    given = Cluster.from_config(job.config["cluster"]) if job.config.get("cluster") else None
    names = [doctor.driver_name(device)]
    if given is not None and job.on_gpus:
        _check_types(given, meeting.gather("finding the cluster's devices", names[0]))
    has_bf16 = all("bfloat16" in report.dtypes for report in reports)
    dtype = wanted if wanted != "auto" else "float32" if not job.on_gpus else "bfloat16" if has_bf16 else "float16"
    shape = ModelShape.from_hf_config(job.config["model"]["config"], job.config["model"]["name"])

    hosts = meeting.gather("finding hosts", socket.gethostname())
    sharers = 1 if job.on_gpus else hosts.count(socket.gethostname())
    kernel = "auto" if job.on_gpus or given is None else job.devices[rank].kernel
    bench = _together(meeting, "setting up", lambda: set_up(shape, device, dtype, kernel, sharers))
    # Devices before links and after them: a machine that is slow for some seconds is not slow in all.
    time_half = functools.partial(time_calls, bench, recipe["seconds"] / 2, job.quotas[rank] if job.quotas else None)
    rounds = [time_half()]
    meeting.gather("measuring devices", None)

    # A wait for a rank that hangs must end by itself.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    nodes = [report.node for report in reports]
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if job.on_gpus else "gloo", timeout=timeout)
        links = measure_links(nodes, device, recipe["link_seconds"], timeout)
    except RuntimeError as error:
        raise meeting.blame("measuring links", error) from error
    rounds.append(time_half())
    entry: dict[str, Any] = measured(bench, rounds) | links
    del bench, time_half
    meeting.gather("measuring devices again", None)
    vendor = "cpu" if not job.on_gpus else "amd" if torch.version.hip else "nvidia"
    entry |= {
        "node": nodes[rank],
        "host": socket.gethostname(),
        "device": reports[rank].device if vendor == "cpu" else names[0],
        "vendor": vendor,
        "dtypes": reports[rank].dtypes,
        "cores": job.cores[rank] if job.cores else sorted(os.sched_getaffinity(0)) if vendor == "cpu" else [],
        "workload": f"{shape.name}, {dtype}",
    }
    entries = meeting.gather("collecting", entry)
    if rank == 0:
        survey = describe(recipe["save"] or "measured", entries, catalogue(), given, recipe["alike"])
        if given is not None and given.namespaces:
            survey.cluster["namespaces"] = True
        raw = {"doctor": [asdict(report) for report in reports], "noted": compared.noted, "settings": recipe,
               "dtype": dtype, "model": asdict(shape), "types": survey.types, "rates": survey.rates,
               "links": survey.links, "ranks": entries}  # fmt: skip
        _write(job, survey.cluster, raw)
        if given is None and len(set(hosts)) == 1:
            devices = [entry["device"] for entry in entries] if job.on_gpus else [reports[0].cpu]
            complaint = cache.store(cache.key(devices, free_cores, ranks, wanted, shape), survey.cluster)
            if complaint is not None and not job.quiet:
                survey.lines.append(f"not kept for runs without +cluster: {complaint}")
        if not job.quiet:
            print("\n".join(survey.lines))
            _say_where(job)
    meeting.leave()
    dist.destroy_process_group()


def catalogue() -> dict[str, Device]:
    """The device types of ``conf/gpu``."""
    entries = [device_from_config(yaml.safe_load(path.read_text())) for path in sorted((CONF / "gpu").glob("*.yaml"))]
    return {device.type: device for device in entries}


def quick(config: Config, ranks: int | None) -> dict[str, Any]:
    """This machine as a cluster: as it was measured before, or measured now.

    Returns:
        ``cluster``, ``note``: where it comes from, in words, and ``warning``: why it could not be kept, or None.
    """
    import torch

    from hexiseq import doctor
    from hexiseq.profile import cache

    config = {**config, "recipe": QUICK, "cluster": None}
    with tempfile.TemporaryDirectory(prefix="hexiseq-profile-") as folder:
        job = prepare(config, Path(folder), ranks=ranks, quiet=True)
        devices = [torch.device("cuda", i) for i in range(job.world_size)]
        names = [doctor.driver_name(device) for device in devices] if job.on_gpus else [doctor.processor()]
        shape = ModelShape.from_hf_config(config["model"]["config"], config["model"]["name"])
        cores = sorted(os.sched_getaffinity(0))
        key = cache.key(names, cores, job.world_size, config["strategy"]["dtype"], shape)
        if (kept := cache.load(key)) is not None:
            when = datetime.datetime.fromtimestamp(time.time() - kept[1]).strftime("%Y-%m-%d %H:%M")
            note = f"this machine as measured on {when} ({cache.path_of(key)}); recipe=profile measures it again"
            return {"cluster": kept[0], "note": note, "warning": None}
        began = time.perf_counter()
        launch.start_ranks([sys.executable, "-m", "recipes.profile", folder], job.devices, job.run_dir)
        cluster = yaml.safe_load((Path(folder) / "cluster.yaml").read_text())["cluster"]
        took = time.perf_counter() - began
        kept_now = cache.load(key) is not None
        note = f"no cluster was named: measured {job.world_size} ranks of this machine in {took:.0f} s"
        warning = (
            None if kept_now else f"{cache.folder()} cannot be written: the measurement is not kept for later runs"
        )
        return {"cluster": cluster, "note": note, "warning": warning}


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _settle(job: Job) -> Any:
    """Put this rank on its device; returns that."""
    import torch

    from hexiseq.environment import gpu_of

    local = int(os.environ.get("LOCAL_RANK", "0"))
    if job.on_gpus:
        local = gpu_of(local)
        if local >= torch.cuda.device_count():
            raise ValueError(f"rank {launch.rank()} on {socket.gethostname()} is number {local} there, which has "
                             f"{torch.cuda.device_count()} GPUs; start at most one rank a GPU")  # fmt: skip
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    if job.cores:
        launch.settle(job.devices, job.cores, job.berths)
    else:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[local % len(cores)]})
        launch.prepare_cpu()
        torch.set_num_threads(1)
    return torch.device("cpu")


def _together(meeting: Any, what: str, work: Callable[[], Any]) -> Any:
    """What `work` returns here; a ValueError of any rank's ends all of them with the same words."""
    result, error = None, None
    try:
        result = work()
    except ValueError as raised:
        error = str(raised)
    errors = meeting.gather(what, error)
    if found := [(rank, error) for rank, error in enumerate(errors) if error is not None]:
        meeting.leave()
        rank, error = found[0]
        raise ValueError(f"{meeting.who(rank)}: {error}")
    return result


def _check_types(given: Cluster, reported: list[str]) -> None:
    """Raises where the ranks' GPUs are not those of the cluster. The same on all ranks."""
    from hexiseq.doctor import recognise

    names = {device.type: device.names for device in given.devices}
    there = Counter(recognise(name, names) or name for name in reported)
    wanted = Counter(place.device.type for place in given.places)
    if there != wanted:
        words = ["".join(f"{count} {kind}, " for kind, count in sorted(c.items()))[:-2] for c in (wanted, there)]
        raise ValueError(f"cluster {given.name!r} has {words[0]}, the ranks are {words[1]}; leave +cluster out to "
                         "measure what there is")  # fmt: skip


def cluster_yaml(cluster: Mapping[str, Any], model: str, words: str) -> str:
    """A file for ``conf/cluster``, or wherever Hydra looks for the group ``cluster``."""
    head = f"# @package _global_\n# {words}\n# Rates are achieved ones, all ranks working at one time.\n"
    default = ""
    if (CONF / "model" / f"{model}.yaml").is_file():
        default = f"defaults:\n  - override /model: {model}\n\n"
    return (
        head + default + yaml.safe_dump({"cluster": dict(cluster)}, sort_keys=False, default_flow_style=None, width=120)
    )


def _write(job: Job, cluster: Mapping[str, Any], raw: Mapping[str, Any]) -> None:
    when = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    words = f"Measured by recipe=profile on {when}, torch {raw['doctor'][0]['torch']}."
    text = cluster_yaml(cluster, job.config["model"]["name"], words)
    targets = {job.run_dir / "cluster.yaml": text, job.run_dir / "profile.json": json.dumps(raw, indent=1) + "\n"}
    if job.saved:
        targets[job.saved] = text
    for path, content in targets.items():
        try:
            path.write_text(content)
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror or error}") from None


def _say_where(job: Job) -> None:
    print(f"written: {job.run_dir / 'cluster.yaml'}, {job.run_dir / 'profile.json'}")
    if job.saved:
        print(f"written: {job.saved}; plan for it with +cluster={job.saved.stem}")
    else:
        print("recipe.save=NAME keeps it for +cluster=NAME")


def _check(config: Config) -> None:
    recipe = config["recipe"]
    for key in ("seconds", "link_seconds", "timeout_seconds"):
        value = recipe[key]
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not (number and 0 < value <= MOST_SECONDS):
            raise ValueError(f"recipe.{key} must be above 0 and at most {MOST_SECONDS}, got {value!r}")
    alike = recipe["alike"]
    if not isinstance(alike, (int, float)) or isinstance(alike, bool) or not 0 <= alike < 1:
        raise ValueError(f"recipe.alike must be a fraction from 0 to below 1, got {alike!r}")
    if not isinstance(recipe["overwrite"], bool):
        raise ValueError(f"recipe.overwrite must be true or false, got {recipe['overwrite']!r}")
    dtype = config["strategy"]["dtype"]
    if dtype not in ("auto", *DTYPES):
        raise ValueError(f"strategy.dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    ModelShape.from_hf_config(config["model"]["config"], config["model"]["name"])


def _saved(recipe: Config) -> Path | None:
    """Where ``recipe.save`` puts the cluster. Raises ValueError where it cannot, or must not."""
    save = recipe["save"]
    if save is None:
        return None
    if not isinstance(save, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", save):
        raise ValueError(f"recipe.save must be a name of at most 100 letters, digits, _ and -, got {save!r}")
    path = CLUSTERS / f"{save}.yaml"
    if path.is_dir() or path.is_symlink():
        raise ValueError(f"recipe.save={save}: {path} is a folder or a link; choose another name")
    if path.exists() and not recipe["overwrite"]:
        raise ValueError(f"recipe.save={save}: {path} exists; choose another name, or recipe.overwrite=true")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"recipe.save={save}: {path.parent} cannot be written; take cluster.yaml from the run folder")
    return path


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_dir = Path(sys.argv[1])
        prepared = Job.from_dict(json.loads((run_dir / "job.json").read_text()))
        launch.worker(lambda: run(prepared), run_dir)
    else:
        request = json.load(sys.stdin)
        try:
            answer = quick(request["config"], request["ranks"])
        except (ValueError, launch.RankFailed) as error:
            sys.exit(str(error))
        print(json.dumps(answer))
