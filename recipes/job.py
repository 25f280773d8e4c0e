"""What every recipe starts from: a resolved configuration turned into cluster, workload and plan, in a run folder."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hexiseq import launch, picture, testbed
from hexiseq.cluster import Cluster, Place, device_from_config, offload_lacks
from hexiseq.cost import match_places, predict
from hexiseq.plan import DTYPES, NO_OFFLOAD, RECOMPUTE_MODES, Plan, RankDevice, table
from hexiseq.rehearsal import rehearse_cluster, rehearse_model, rehearse_plan
from hexiseq.schedule import modes, solve_modes
from hexiseq.workload import ModelShape, Workload
from recipes.walltime import Walltime, walltime_within

if TYPE_CHECKING:
    from hexiseq.data import HexiSeqDataModule

Config = dict[str, Any]

MOST_TIMEOUT_SECONDS = 7 * 86400
CHECKPOINT_PARTS = (".metadata", "meta.pt")  # written last
CONF = Path(__file__).resolve().parent.parent / "conf"


@dataclass(frozen=True)
class Job:
    """A prepared run.

    Attributes:
        config: the resolved configuration; in a rehearsal its model and data are the shrunken ones.
        plan: what the ranks run.
        target: in a rehearsal, the real cluster's plan with its predictions.
        cores: per rank, the CPU cores it is pinned to.
        berths: per rank, its CPU quota and network namespace.
        device_names: device type -> what the driver calls it, to find the plan's devices among the ranks'.
        assigned: ranks are told which device they are (CPU ranks, rehearsals, devices measured in place).
        on_gpus: the plan's devices are GPUs, and not rehearsed.
        limit_seconds: the Slurm job's time limit; infinite where there is none.
    """

    config: Config
    run_dir: Path
    plan: Plan
    target: Plan | None
    cores: tuple[tuple[int, ...], ...]
    berths: tuple[testbed.Berth, ...]
    device_names: dict[str, tuple[str, ...]]
    assigned: bool
    on_gpus: bool
    limit_seconds: float

    @property
    def walltime(self) -> Walltime:
        """Of the steps that run, in a rehearsal the small ones. Raises ValueError where no step would end in time."""
        assert self.plan.predicted is not None
        step_seconds, steps = self.plan.predicted.step_seconds, self.config["trainer"]["max_steps"]
        return walltime_within(step_seconds, steps, self.limit_seconds, "the Slurm job's --time")

    @property
    def devices(self) -> tuple[RankDevice, ...]:
        return self.plan.devices

    def to_dict(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "run_dir": str(self.run_dir),
            "plan": self.plan.to_dict(),
            "target": self.target and self.target.to_dict(),
            "cores": [list(cores) for cores in self.cores],
            "berths": [dataclasses.asdict(berth) for berth in self.berths],
            "device_names": {kind: list(names) for kind, names in self.device_names.items()},
            "assigned": self.assigned,
            "on_gpus": self.on_gpus,
            "limit_seconds": None if self.limit_seconds == math.inf else self.limit_seconds,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Job:
        return Job(
            config=dict(data["config"]),
            run_dir=Path(data["run_dir"]),
            plan=Plan.from_dict(data["plan"]),
            target=Plan.from_dict(data["target"]) if data["target"] else None,
            cores=tuple(tuple(cores) for cores in data["cores"]),
            berths=tuple(testbed.Berth(**berth) for berth in data["berths"]),
            device_names={kind: tuple(names) for kind, names in data["device_names"].items()},
            assigned=data["assigned"],
            on_gpus=data["on_gpus"],
            limit_seconds=math.inf if data["limit_seconds"] is None else data["limit_seconds"],
        )


def solve_config(config: Config, *, members: Sequence[launch.Member] | None = None) -> tuple[Cluster, Workload, Plan]:
    """Cluster, workload and plan of a configuration.

    Args:
        members: the ranks a launcher has started already or is about to; they must be the cluster's devices, or the
            cluster is taken to be what they are, as `launch.mismatch` says. The plan's ranks are numbered as theirs.

    Raises:
        ValueError: anything the user can put right, before any process starts.
    """
    _check(config)
    cluster = Cluster.from_config(config["cluster"]) if config.get("cluster") else detect(config, members)
    present = None
    if members is not None:
        on_gpus = config.get("cluster") and any(device.vendor != "cpu" for device in cluster.devices)
        present = launch.roster(members, cluster if on_gpus else None, config["slurm"]["gres"])
        print(present.table(), flush=True)
        cluster, warning = launch.reconcile(cluster, present, config["launch"]["mismatch"])
        if warning:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    workload = workload_of(config, cluster)
    strategy = config["strategy"]
    manual = None
    if strategy["policy"] == "manual":
        if not strategy["plan"]:
            raise ValueError("strategy=manual needs strategy.plan=FILE, a plan.json of an earlier run")
        manual = Plan.load(strategy["plan"])
    elif strategy["plan"]:
        raise ValueError(f"strategy.plan={strategy['plan']} is only read by strategy=manual, not {strategy['policy']}")
    recompute, keep, offload = strategy["recompute"], strategy["keep_parameters"], strategy["offload"]
    if manual is not None:  # a plan says both itself
        recompute = manual.recompute if recompute == "auto" else recompute
        # With recompute none, which is not this plan's, no workload offloads: the error is to be about the plan.
        offload = manual.offload and recompute != "none" if offload == "auto" else offload
    if offload == "auto" and (lacking := offload_lacks(cluster.places)):
        print(f"warning: strategy.offload=auto does without offload: {lacking}", file=sys.stderr, flush=True)
        offload = False
    open_modes = modes(workload, *(None if choice == "auto" else choice for choice in (recompute, keep, offload)))
    # Ranks started here sit on the GPUs in their order, so that none that was detected can be left out.
    seated = present is not None or (not config.get("cluster") and any(d.vendor != "cpu" for d in cluster.devices))
    plan, workload = solve_modes(
        cluster,
        open_modes,
        strategy["policy"],
        manual=manual,
        slot=strategy["slot"],
        exchange=strategy["exchange"],
        drop_devices=strategy["drop_devices"] and not seated,
        time_limit_seconds=strategy["time_limit_seconds"],
    )
    if present is not None and present.known:
        plan = launch.match_ranks(plan, present.identities)
    return cluster, workload, plan


def workload_of(config: Config, cluster: Cluster) -> Workload:
    strategy, trainer = config["strategy"], config["trainer"]
    return Workload(
        model=ModelShape.from_hf_config(config["model"]["config"], config["model"]["name"]),
        seq_len=config["data"]["seq_len"],
        dtype=common_dtype(strategy["dtype"], cluster),
        recompute="selective" if strategy["recompute"] == "auto" else strategy["recompute"],
        sequences=trainer["sequences"],
        accumulation=trainer["accumulation"],
        keep_parameters=strategy["keep_parameters"] is True,
    )


def common_dtype(wanted: str, cluster: Cluster) -> str:
    """The one compute type of the job. ``auto``: bfloat16 where every device has it, else float16; float32 on CPUs.

    Raises:
        ValueError: naming the device types that cannot run what was asked for.
    """
    if wanted == "auto":
        if all(device.vendor == "cpu" for device in cluster.devices):
            return "float32"
        wanted = "bfloat16" if all("bfloat16" in device.dtypes for device in cluster.devices) else "float16"
    if wanted not in DTYPES:
        raise ValueError(f"strategy.dtype {wanted!r} is not one of auto, {', '.join(DTYPES)}")
    if unable := [device.type for device in cluster.devices if wanted not in device.dtypes]:
        raise ValueError(
            f"strategy.dtype {wanted}: {', '.join(unable)} cannot run it; choose another, or strategy.dtype=auto"
        )
    return wanted


def prepare(config: Config, run_dir: Path, *, members: Sequence[launch.Member] | None = None) -> Job:
    """Plan the run, rehearse it where the cluster's devices are absent, and write the run folder's files.

    Args:
        members: of `solve_config`.

    Raises:
        ValueError: anything the user can put right, before any process starts.
    """
    cluster, workload, plan = solve_config(config, members=members)
    if config["ckpt_path"] == "auto":
        config = {**config, "ckpt_path": newest_checkpoint(run_dir)}
    config = {**config, "strategy": {**config["strategy"], "recompute": plan.recompute, "offload": plan.offload,
                                     "keep_parameters": workload.keep_parameters}}  # fmt: skip
    if plan.dtype == "float16":
        lacking = ", ".join(d.type for d in cluster.devices if "bfloat16" not in d.dtypes) or "the configuration"
        raise ValueError(
            f"{lacking} asks for float16, and training in it needs loss scaling, which is not supported; leave those "
            "devices out of the cluster, or set strategy.dtype=float32"
        )
    target = None
    if missing_gpus(cluster):
        target = plan
        config, plan = _rehearse(config, workload, plan)
        cores: tuple[tuple[int, ...], ...] = ((),) * plan.world_size
        places: tuple[Place, ...] = ()
    else:
        places = match_places(plan, cluster)
        cores = tuple(place.seat.cores for place in places)
        absent = sorted({core for own in cores for core in own} - os.sched_getaffinity(0))
        if absent and (members is None or len({member.node for member in members}) == 1):
            print(f"warning: cores {', '.join(map(str, absent))} of cluster {cluster.name!r} are not available here; "
                  "ranks that have no other are not pinned, and their speeds not what the cluster says",
                  file=sys.stderr, flush=True)  # fmt: skip
    from recipes.loggers import check  # which needs Lightning: only for those who train

    _check_training(config)
    check(config)
    make_folder(run_dir)
    on_cpu = all(device.vendor == "cpu" for device in cluster.devices)
    job = Job(
        config,
        run_dir,
        plan,
        target,
        cores,
        testbed.build(places, cluster.namespaces) if places else (testbed.Berth(),) * plan.world_size,
        device_names={device.type: device.names for device in cluster.devices},
        assigned=on_cpu or target is not None or not config.get("cluster"),
        on_gpus=not on_cpu and target is None,
        limit_seconds=launch.slurm.limit_seconds(),
    )
    plan.save(run_dir / "plan.json")
    if target:
        target.save(run_dir / "plan.target.json")
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (run_dir / "job.json").write_text(json.dumps(job.to_dict()))
    picture.draw(run_dir, target or plan, cluster, workload, rehearsal=target is not None)
    return job


def newest_checkpoint(run_dir: Path) -> str | None:
    """The checkpoint a run that was cut off goes on from: the last whole one of its folder, if there is one."""
    steps = {}
    for folder in (run_dir / "checkpoints").glob("step-*"):
        number = folder.name.removeprefix("step-")
        if number.isdigit() and all((folder / part).is_file() for part in CHECKPOINT_PARTS):
            steps[int(number)] = folder
        else:
            print(f"warning: {folder} is no whole checkpoint and left aside", file=sys.stderr, flush=True)
    return str(steps[max(steps)]) if steps else None


def enlist(
    config: Config, own: launch.Party, there: Sequence[launch.Presence]
) -> tuple[list[launch.Member] | None, list[int]]:
    """The ranks of a job whose processes a launcher has started (`launch.members`), and how many each starts.

    None where this process is alone and no cluster is named: what it finds on its machine is measured and used.
    """
    if not config.get("cluster"):
        return (None, []) if own.agents and own.size == 1 else launch.members(own, there, None, on_gpus=True)
    cluster = Cluster.from_config(config["cluster"])
    nodes = [len(list(places)) for _, places in itertools.groupby(cluster.places, key=lambda place: place.node)]
    return launch.members(own, there, nodes, any(device.vendor != "cpu" for device in cluster.devices))


def make_folder(folder: Path, key: str = "hydra.run.dir") -> None:
    """Make a folder for runs. Raises ValueError where it cannot be written to: `key` chooses another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"the run folder {folder} cannot be written to: {error.strerror or error}; choose another with {key}=FOLDER"
        ) from None


def data_module(config: Config) -> HexiSeqDataModule:
    """The data of a configuration; its parameters are checked here, documents are read at setup."""
    # Not at the top: recipe=plan must not pay for importing torch.
    from hexiseq.data import HexiSeqDataModule

    data = config["data"]
    return HexiSeqDataModule(
        data["name"],
        data["seq_len"],
        config["seed"],
        data["validation_fraction"],
        tokenizer=data["tokenizer"],
        path=data["path"],
        synthetic=data["synthetic"],
        mask_documents=data["mask_documents"],
        restart_positions=data["restart_positions"],
        arrange_documents=data["arrange_documents"],
    )


def _check_training(config: Config) -> None:
    """What every rank would find out for itself half a minute later: model, optimizer, documents, checkpoint."""
    import torch

    from hexiseq.models import build_model
    from hexiseq.module import CausalLM

    model = config["model"]
    weights, path = model["weights"], config["ckpt_path"]
    example = "name a folder such as RUN_DIR/checkpoints/step-30"
    if weights is not None and not (isinstance(weights, str) and Path(weights).is_dir()):
        raise ValueError(f"model.weights {weights!r} is not a folder; give that of a saved Hugging Face model")
    if path is not None:
        if not isinstance(path, str) or not Path(path).exists():
            raise ValueError(f"ckpt_path {path!r} does not exist; {example}")
        for part in CHECKPOINT_PARTS:
            if not (Path(path) / part).is_file():
                raise ValueError(f"ckpt_path {path!r} is no whole checkpoint: it lacks {part}; {example}")
    CausalLM(model["config"], config["recipe"]["optimizer"], config["seed"], weights=weights)
    build_model(model["config"], torch.float32, seed=None)
    data = data_module(config)
    data.setup()
    if data.vocab_size > (vocab := model["config"]["vocab_size"]):
        raise ValueError(f"model.config.vocab_size {vocab} is smaller than the data's {data.vocab_size} tokens")


def load(run_dir: Path) -> Job:
    """The job `prepare` wrote to a run folder."""
    return Job.from_dict(json.loads((run_dir / "job.json").read_text()))


def missing_gpus(cluster: Cluster) -> bool:
    """Whether the cluster has GPUs and this machine none: then the plan can only be rehearsed."""
    if all(device.vendor == "cpu" for device in cluster.devices):
        return False
    import torch

    return not torch.cuda.is_available()


def _rehearse(config: Config, workload: Workload, plan: Plan) -> tuple[Config, Plan]:
    vocab_size = data_module(config).vocab_size
    shrink = config["recipe"]["rehearsal"]
    small = rehearse_plan(plan, min(shrink["seq_len"], plan.seq_len))
    name = f"{config['model']['name']}-rehearsal"
    shape = rehearse_model(config["model"]["config"], shrink, vocab_size, small.seq_len / plan.seq_len)
    config = {
        **config,
        "model": {"name": name, "weights": None, "config": shape},
        "data": {**config["data"], "seq_len": small.seq_len},
    }
    core = device_from_config(yaml.safe_load((CONF / "gpu" / "cpu_core.yaml").read_text()))
    small_workload = dataclasses.replace(
        workload,
        model=ModelShape.from_hf_config(shape, name),
        seq_len=small.seq_len,
        dtype=small.dtype,
    )
    here = rehearse_cluster(small, core, len(os.sched_getaffinity(0)))
    return config, dataclasses.replace(small, predicted=predict(small, here, small_workload))


def detect(config: Config, members: Sequence[launch.Member] | None = None) -> Cluster:
    """The devices at hand as a cluster, as measured before or measured now (`recipes.profile`).

    That is done by processes of their own: CUDA must not be initialised in this one.

    Args:
        members: the ranks there will be; None: one per GPU, or per CPU core up to four.

    Raises:
        ValueError: measuring failed, or the ranks a launcher started are on several machines.
    """
    ranks = None if members is None else len(members)
    if members is not None and len(nodes := dict.fromkeys(member.node for member in members)) > 1:
        raise ValueError(
            f"the {ranks} ranks are on {len(nodes)} nodes ({', '.join(list(nodes)[:4])}), and without +cluster only "
            "one machine is measured; run recipe=profile recipe.save=NAME under the same launcher once, then "
            "+cluster=NAME"
        )
    # Where a launcher started this process, its variables are not for those that measure.
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "SLURM_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launched)}
    paths = [str(CONF.parent), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command, request = [sys.executable, "-m", "recipes.profile"], json.dumps({"config": config, "ranks": ranks})
    try:
        done = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=300, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise ValueError("measuring this machine took more than 300 s; name a cluster with +cluster=NAME") from None
    if done.returncode:
        raise ValueError(f"measuring this machine failed; name a cluster with +cluster=NAME\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    print(answer["note"], flush=True)
    if answer["warning"]:
        print(f"warning: {answer['warning']}", file=sys.stderr, flush=True)
    return Cluster.from_config(answer["cluster"])


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check(config: Config) -> None:
    """Values the rest of the code takes for granted, each refused by its command-line name."""
    trainer = config["trainer"]

    def whole(name: str, value: Any, least: int) -> None:
        if not _whole(value, least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")

    whole("data.seq_len", config["data"]["seq_len"], 2)
    whole("seed", config["seed"], 0)
    if config["seed"] >= 2**32:
        raise ValueError(f"seed must be below 2^32, got {config['seed']}")
    for key, least in (("max_steps", 1), ("sequences", 1), ("accumulation", 1), ("validation_sequences", 0)):
        whole(f"trainer.{key}", trainer[key], least)
    for key in ("validate_every", "checkpoint_every", "print_every", "split_every"):
        if trainer[key] is not None:
            whole(f"trainer.{key}", trainer[key], 1)
    traced = trainer["trace_steps"]
    steps = traced if isinstance(traced, list) else []
    if traced is not None and not (len(steps) == 2 and all(_whole(step, 1) for step in steps) and steps[0] < steps[1]):
        raise ValueError(
            f"trainer.trace_steps must be two ascending steps from 1 on, [first, last), or null; got {traced!r}"
        )
    clip = trainer["gradient_clip"]
    number = isinstance(clip, (int, float)) and not isinstance(clip, bool) and math.isfinite(clip)
    if clip is not None and not (number and clip > 0):
        raise ValueError(f"trainer.gradient_clip must be a positive number or null, got {clip!r}")
    waits = (("strategy", "timeout_seconds"), ("launch", "timeout_seconds"), ("launch", "preflight_timeout_seconds"))
    for section, key in waits:
        wait = config[section][key]
        if not isinstance(wait, (int, float)) or isinstance(wait, bool) or not 0 < wait <= MOST_TIMEOUT_SECONDS:
            raise ValueError(f"{section}.{key} must be above 0 and at most {MOST_TIMEOUT_SECONDS}, got {wait!r}")
    launched = config["launch"]
    if launched["mismatch"] not in launch.MISMATCH:
        raise ValueError(f"launch.mismatch {launched['mismatch']!r} is not one of {', '.join(launch.MISMATCH)}")
    if not isinstance(launched["preflight"], bool):
        raise ValueError(f"launch.preflight must be true or false, got {launched['preflight']!r}")
    strategy = config["strategy"]
    if not isinstance(strategy["drop_devices"], bool):
        raise ValueError(f"strategy.drop_devices must be true or false, got {strategy['drop_devices']!r}")
    for key in ("keep_parameters", "offload"):
        if strategy[key] != "auto" and not isinstance(strategy[key], bool):
            raise ValueError(f"strategy.{key} must be true, false or auto, got {strategy[key]!r}")
    if strategy["recompute"] not in (*RECOMPUTE_MODES, "auto"):
        raise ValueError(
            f"strategy.recompute {strategy['recompute']!r} is not one of {', '.join(RECOMPUTE_MODES)}, auto"
        )
    if strategy["offload"] is True and strategy["recompute"] == "none":
        raise ValueError(f"strategy.offload=true with strategy.recompute=none: {NO_OFFLOAD}")


def announce(job: Job) -> None:
    """Say what is about to run: the plan, in a rehearsal what it rehearses, and how long it takes.

    Raises:
        ValueError: the Slurm job's time limit is shorter than a step.
    """
    walltime = job.walltime
    if job.target is None:
        print(table(job.plan), flush=True)
    else:
        types = ", ".join(sorted({device.type for device in job.target.devices}))
        print(
            f"REHEARSAL: this machine has none of {types}. The plan below is for the real cluster; its figures are "
            f"predictions.\n{table(job.target)}\nRunning it with {job.plan.world_size} CPU processes: the same groups, "
            f"heads and token shares; {job.plan.seq_len:,} tokens and a small model. What is predicted of these steps "
            "is their kernels and transfers; Python and gloo take as long or longer where steps are so small.",
            flush=True,
        )
    print(f"{walltime}\nrun folder: {job.run_dir}", flush=True)


def last_metrics(run_dir: Path) -> dict[str, str]:
    """The newest non-empty value of every column of a run's metrics.csv.

    Without one, what its plan predicts; if a step was simulated, ``simulated_step_seconds`` besides.
    """
    path, plan, simulation = (run_dir / name for name in ("metrics.csv", "plan.json", "simulation.json"))
    if not path.exists():
        found = {}
        if plan.exists() and (predicted := Plan.load(plan).predicted):
            found["predicted_step_seconds"] = str(predicted.step_seconds)
        if simulation.exists():
            found["simulated_step_seconds"] = str(json.loads(simulation.read_text())["step_seconds"])
        return found
    with path.open(newline="") as file:
        return {key: value for row in csv.DictReader(file) for key, value in row.items() if value}
