"""The sbatch file of a cluster, printed or written; or a file checked against a cluster. Nothing is submitted."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from hexiseq.cluster import Cluster, gres_of
from hexiseq.plan import Plan
from recipes.job import Config, solve_config
from recipes.walltime import Walltime, duration, seconds_of, walltime_within

STARTS = {
    "agents": "a task per node, which starts the node's ranks",
    "tasks": "a task per rank",
    "torchrun": "a torchrun per node",
}
# Of the recipe and of the site: what shapes the file. The rest is the job's.
OWN_KEYS = ("file", "check", "start", "time", "signal_seconds")
FILE_KEYS = ("account", "qos", "cpus_per_gpu", "memory_gb_per_gpu", "setup", "srun")
SITE_BEGINS, SITE_ENDS = "# --- site: modules, environment, network", "# --- end of site"
SITE_EXAMPLE = ("# module load cuda", "# source .venv/bin/activate", "# export NCCL_SOCKET_IFNAME=...")
MOST_SIGNAL_SECONDS = 65535  # sbatch's


@dataclass(frozen=True)
class Component:
    """Nodes alike, as Slurm is asked for them: a node class of the cluster, or what a file says.

    Attributes:
        name: the node class, or which component of the file.
        partition: empty where a file does not say.
        nodes: None where a file does not say one number.
        gpus: per node, gres type -> how many; a type is empty where a file does not say.
        tasks, ranks: per node.
        cpus: per node; None: the site's default.
    """

    name: str
    partition: str
    nodes: int | None
    gpus: Mapping[str, int]
    tasks: int
    ranks: int
    cpus: int | None = None

    def __str__(self) -> str:
        nodes = "unknown" if self.nodes is None else self.nodes
        return f"{self.name} ({nodes} node{'' if nodes == 1 else 's'}, {self.gres or 'no GPUs'})"

    @property
    def gres(self) -> str:
        return ",".join(":".join(filter(None, ("gpu", name, str(count)))) for name, count in self.gpus.items())


def run(config: Config, run_dir: Path, arguments: Sequence[str] | None = None) -> None:
    """Print, write or check the file.

    Args:
        arguments: of the command line, which go into the file; None: what Hydra got.

    Raises:
        ValueError: what cannot be asked of Slurm; or what in the checked file disagrees with the cluster.
    """
    recipe = config["recipe"]
    _check(config)
    if not config.get("cluster"):
        raise ValueError("recipe=slurm asks Slurm for the nodes of a cluster; name one with +cluster=NAME")
    # A job has a rank on every device it asks for.
    cluster, _, plan = solve_config({**config, "strategy": {**config["strategy"], "drop_devices": False}})
    if plan.excluded:
        left = ", ".join(dict.fromkeys(device.type for device in plan.excluded))
        raise ValueError(
            f"strategy={plan.policy} leaves out devices of type {left}, for which Slurm need not be asked; choose a "
            "cluster without them, or another strategy"
        )
    assert plan.predicted is not None
    _check_host_memory(plan, config["slurm"]["memory_gb_per_gpu"])
    step_seconds, steps = plan.predicted.step_seconds, config["trainer"]["max_steps"]
    wanted = components(cluster, config["slurm"], recipe["start"])
    if recipe["check"] is not None:
        print(check(Path(recipe["check"]), wanted, cluster.name, step_seconds, steps))
        return
    walltime = walltime_within(step_seconds, steps, seconds_of(recipe["time"]), "recipe.time")
    text = script(config, cluster.name, wanted, walltime, _arguments() if arguments is None else arguments)
    fast = next((rival for rival in plan.rivals if rival.name == "fast_only" and rival.step_seconds), None)
    if fast and fast.step_seconds and fast.step_seconds < step_seconds:
        print(
            f"warning: the fast devices alone are predicted to take {duration(fast.step_seconds)} a step, all together "
            f"{duration(step_seconds)}; a cluster without the others would do",
            file=sys.stderr,
        )
    if walltime.runs > 1:
        print(f"warning: {walltime}", file=sys.stderr)
    if recipe["file"] is None:
        print(text, end="")
        return
    path = Path(recipe["file"])
    try:
        path.write_text(_with_site_of(path, text) if path.exists() else text)
    except OSError as error:
        raise ValueError(f"recipe.file {path} cannot be written: {error.strerror or error}") from None
    print(f"{walltime}\nwritten: {path}; submit it with: sbatch {shlex.quote(str(path))}")


def _check_host_memory(plan: Plan, asked_gb: float | None) -> None:
    """With offload, Slurm must be asked for the host memory that layers' inputs go to.

    Args:
        asked_gb: per GPU; None: what the site gives.
    """
    if not plan.offload:
        return
    assert plan.predicted is not None
    nodes: dict[str, list[float]] = {}
    for device, gb in zip(plan.devices, plan.predicted.host_memory_gb, strict=True):
        nodes.setdefault(device.node, []).append(gb)
    least, node = max((sum(held) / len(held), node) for node, held in nodes.items())
    words = f"node {node} keeps {least:.3g} GB of layers' inputs a GPU in host memory, besides what its ranks need"
    if asked_gb is None:
        print(f"warning: {words}; slurm.memory_gb_per_gpu=GB asks for it", file=sys.stderr)
    elif asked_gb <= least:
        raise ValueError(f"{words}, and slurm.memory_gb_per_gpu asks for {asked_gb:g}; ask for more")


def components(cluster: Cluster, site: Config, start: str) -> list[Component]:
    """What a cluster needs: a component per node class. The ranks of a CPU cluster share one node.

    Raises:
        ValueError: two device types that the site's names do not tell apart.
    """
    per_gpu = site["cpus_per_gpu"]
    if all(device.vendor == "cpu" for device in cluster.devices):
        ranks = len(cluster.places)
        cores = {core for place in cluster.places for core in place.seat.cores}
        partition = gres_of(cluster.devices[0].type, site["partition"])
        tasks, cpus = (ranks if start == "tasks" else 1), per_gpu * ranks if per_gpu else len(cores) or ranks
        return [Component(cluster.name, partition, 1, {}, tasks, ranks, cpus)]
    called: dict[tuple[str, str], str] = {}
    for device in cluster.devices:
        names = gres_of(device.type, site["partition"]), gres_of(device.type, site["gres"])
        other = called.setdefault(names, device.type)
        if other != device.type:
            raise ValueError(
                f"{other} and {device.type} are both gres {names[1]!r} in partition {names[0]!r}, and Slurm could give "
                f"one for the other; tell them apart with +slurm.gres.{device.type}=NAME"
            )
    found = []
    for node in cluster.nodes:
        gpus: dict[str, int] = {}
        for seat in node.seats:
            name = gres_of(seat.device.type, site["gres"])
            gpus[name] = gpus.get(name, 0) + 1
        partition, ranks = gres_of(node.seats[0].device.type, site["partition"]), len(node.seats)
        tasks, cpus = (ranks if start == "tasks" else 1), per_gpu * ranks if per_gpu else None
        found.append(Component(node.name, partition, node.count, gpus, tasks, ranks, cpus))
    return found


# --- the file


def script(config: Config, name: str, parts: Sequence[Component], walltime: Walltime, arguments: Sequence[str]) -> str:
    """The whole file. `name`: of the job. `arguments`: of train.py."""
    recipe, site = config["recipe"], config["slurm"]
    wide = {key: site[key] for key in ("account", "qos") if site[key] is not None}
    lines = [
        "#!/bin/bash",
        f"# {' + '.join(f'{part.nodes} x {part.name}' for part in parts)}; {STARTS[recipe['start']]}. Made with",
        f"# python train.py {shlex.join(arguments)}",
        f"#SBATCH --job-name={name}",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        f"#SBATCH --time={recipe['time']}",
        f"#SBATCH --signal=USR1@{recipe['signal_seconds']}",
        *(f"#SBATCH --{key}={value}" for key, value in wide.items()),
        *"\n#SBATCH hetjob\n".join(f"#SBATCH {' '.join(_options(part, site))}" for part in parts).splitlines(),
        "",
        SITE_BEGINS,
        *(site["setup"] or SITE_EXAMPLE),
        SITE_ENDS,
        "",
        "set -euo pipefail",
        f'echo "job $SLURM_JOB_ID, start $((1 + ${{SLURM_RESTART_COUNT:-0}})): {walltime}"',
        *_command(recipe["start"], parts, site, arguments),
    ]
    return "\n".join(lines) + "\n"


def _options(part: Component, site: Config) -> list[str]:
    options = [f"--partition={part.partition}", f"--nodes={part.nodes}", f"--ntasks-per-node={part.tasks}"]
    if part.gpus:
        options.append(f"--gres={part.gres}")
    if part.cpus:
        options.append(f"--cpus-per-task={math.ceil(part.cpus / part.tasks)}")
    if site["memory_gb_per_gpu"]:
        options.append(f"--mem={math.ceil(site['memory_gb_per_gpu'] * part.ranks * 1e9 / 2**20)}M")
    return options


def _command(start: str, parts: Sequence[Component], site: Config, arguments: Sequence[str]) -> list[str]:
    """The lines that start the ranks."""
    run_dir = "outputs/slurm-$SLURM_JOB_ID"
    own = {
        "recipe",
        "check",
        "ckpt_path",
        *(f"recipe.{key}" for key in OWN_KEYS),
        *(f"slurm.{key}" for key in FILE_KEYS),
    }
    job = ["train.py", *(shlex.quote(text) for text in arguments if _key(text) not in own), f"hydra.run.dir={run_dir}"]
    lines, given = [], [text.partition("=")[2] for text in arguments if _key(text) == "ckpt_path"]
    if given and given[-1] not in ("auto", "null"):
        lines += [
            "# Once it has checkpoints of its own, it goes on from them.",
            f'compgen -G "{run_dir}/checkpoints/step-*/meta.pt" >/dev/null && start=auto \\',
            f"  || start={shlex.quote(given[-1])}",
        ]
        job.append('ckpt_path="$start"')
    else:
        job.append("ckpt_path=auto")
    srun = ["srun", f"--het-group={','.join(map(str, range(len(parts))))}"][: 2 if len(parts) > 1 else 1]
    # A task is not bound to the cores of the one it counts as.
    srun += ["--kill-on-bad-exit=1", "--cpu-bind=none", *map(shlex.quote, site["srun"])]
    if start != "torchrun":
        return [*lines, " ".join([*srun, "\\"]), f"  python {' '.join(job)}"]
    ranks = "$SLURM_GPUS_ON_NODE" if parts[0].gpus else parts[0].ranks
    agent = f'python -m torch.distributed.run --nproc-per-node={ranks} --node-rank=$SLURM_NODEID "$@"'
    return [
        *lines,
        "# Rank 0 is on the first node of the first component, wherever its name sorts.",
        'master=$(scontrol show hostnames "${SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}" | sed -n 1p)',
        "# USR1 is for the ranks: it would end torchrun.",
        " ".join([*srun, "bash", "-c", f"'trap \"\" USR1; exec {agent}'", "agent", "\\"]),
        f'  --nnodes={sum(part.nodes or 0 for part in parts)} --master-addr="$master" '
        "--master-port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))} \\",
        f"  {' '.join(job)}",
    ]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _arguments() -> list[str]:
    """Those of this command line."""
    hydra = HydraConfig.get()
    folders = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
    return [*(f"--config-dir={folder}" for folder in folders), *hydra.overrides.task]


def _with_site_of(path: Path, text: str) -> str:
    """The new file with the site lines of the one that is there."""
    old, new = _site(path.read_text()), _site(text)
    if old is None:
        raise ValueError(
            f"recipe.file {path} is there and has no lines {SITE_BEGINS!r} and {SITE_ENDS!r} to keep what is between "
            "them; choose another name, or remove the file"
        )
    assert new is not None
    return text.replace(new, old)


def _site(text: str) -> str | None:
    begin, end = text.find(f"\n{SITE_BEGINS}"), text.find(f"\n{SITE_ENDS}")
    return text[begin:end] if 0 <= begin < end else None


# --- a file that is there


def check(path: Path, wanted: Sequence[Component], name: str, step_seconds: float, steps: int) -> str:
    """One line: the file agrees with the cluster.

    Raises:
        ValueError: all that disagrees.
    """
    try:
        options = _directives(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe.check {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except ValueError as error:
        raise ValueError(f"recipe.check {path}: {error}") from None
    wrong, note = [], ""
    if b"\r\n" in path.read_bytes():
        wrong.append("its lines end as on Windows, which sbatch refuses; dos2unix mends that")
    if options[0].get("signal", "").upper().startswith("B:"):
        wrong.append(f"--signal={options[0]['signal']} goes to the shell alone, not to the ranks; leave out the B:")
    if len(options) > 1 and any("array" in given for given in options):
        wrong.append("--array cannot go with the components of a heterogeneous job; submit it several times")
    limit = options[0].get("time")
    if limit is None:
        wrong.append("no --time; the partition's default would be the limit")
    else:
        try:
            walltime = walltime_within(step_seconds, steps, seconds_of(limit), "--time")
            note = str(walltime)
        except ValueError as error:
            wrong.append(str(error))
    try:
        wrong += disagreements(asked(options), wanted)
    except ValueError as error:
        wrong.append(str(error))
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        needs = ", ".join(map(str, wanted))
        raise ValueError(
            f"{path} disagrees with cluster {name!r}, which is {needs}:{lines}\n"
            "mend the file, or make one with recipe=slurm recipe.file=FILE"
        )
    return f"{path} agrees with cluster {name!r}: {note}"


def asked(options: Sequence[Mapping[str, str]]) -> list[Component]:
    """The components a file asks for. One allocation over several features, ``[h100*1&a100*1]``, counts as several."""
    found = []
    for number, given in enumerate(options):
        where = f"component {number}" if len(options) > 1 else "the job"
        nodes = _nodes(given.get("nodes", "1"))
        features = given.get("constraint", "")
        classes = re.findall(r"([\w.-]+)\*(\d+)", features)
        alone = features if re.fullmatch(r"[\w.-]+", features) else ""
        if "ntasks-per-node" in given:
            tasks = _count(where, "ntasks-per-node", given["ntasks-per-node"])
        else:
            tasks = _each(where, "ntasks", given["ntasks"], nodes) if "ntasks" in given else 1
        gpus = {name or alone: count for name, count in _gpus(where, given, nodes, tasks).items()}
        part = Component(where, given.get("partition", ""), nodes, gpus, tasks, sum(gpus.values()))
        if not classes:
            found.append(part)
            continue
        if nodes != sum(int(count) for _, count in classes):
            raise ValueError(f"{where}: --nodes={given.get('nodes')}, its constraint {features} counts others")
        for feature, count in classes:
            kinds = {name or feature: gpu for name, gpu in gpus.items()}
            found.append(replace(part, name=f"{where}, {feature}", nodes=int(count), gpus=kinds))
    return found


def disagreements(given: Sequence[Component], wanted: Sequence[Component]) -> list[str]:
    """What is wrong with each component, in words. Components are matched by GPUs, then by partition."""
    left, pairs = list(given), []

    def same(*names: str) -> Any:
        return lambda a, b: all(getattr(a, name) == getattr(b, name) for name in names)

    likeness = (
        same("gpus", "nodes", "partition"),
        same("gpus", "nodes"),
        same("gpus"),
        lambda a, b: a.gpus.keys() == b.gpus.keys(),
        same("partition"),
    )
    missing = list(wanted)
    for alike in likeness:
        for need in list(missing):
            if found := next((part for part in left if alike(part, need)), None):
                pairs.append((found, need))
                left.remove(found)
                missing.remove(need)
    wrong = [line for part, need in pairs for line in _differences(part, need)]
    wrong += [f"no component for node class {need}, partition {need.partition}" for need in missing]
    wrong += [
        f"{part}, partition {part.partition or 'unknown'}: no node class of the cluster is like it" for part in left
    ]
    styles = {part.tasks == need.ranks for part, need in pairs if need.ranks > 1 and part.tasks in (1, need.ranks)}
    if len(styles) > 1:
        wrong.append("some components have a task per rank, others one per node; all need the same")
    return wrong


def _differences(part: Component, need: Component) -> list[str]:
    where, found = f"{part.name}, for node class {need.name}", []
    if part.nodes != need.nodes:
        found.append(f"{part.nodes or 'an unknown number of'} nodes, the cluster has {need.nodes}")
    if part.partition != need.partition and "," not in part.name:  # one allocation is in one partition
        found.append(f"partition {part.partition or 'is not given'}, its GPUs are in {need.partition}")
    if sum(part.gpus.values()) != sum(need.gpus.values()):
        found.append(f"{sum(part.gpus.values())} GPUs per node, the cluster has {sum(need.gpus.values())}")
    elif part.gpus != need.gpus and "" not in part.gpus:
        found.append(f"gres {part.gres}, the cluster has {need.gres}")
    if part.tasks not in (1, need.ranks):
        found.append(f"{part.tasks} tasks per node, where it takes 1 (agents, torchrun) or {need.ranks} (tasks)")
    return [f"{where}: {line}" for line in found]


def _directives(text: str) -> list[dict[str, str]]:
    """The options of a file, long names, by component. sbatch reads them up to the first line of the script."""
    short = {"p": "partition", "N": "nodes", "n": "ntasks", "t": "time", "C": "constraint", "G": "gpus"}
    components: list[dict[str, str]] = [{}]
    for line in text.splitlines():
        if not line.startswith("#SBATCH"):
            if line.strip() and not line.startswith("#"):
                break
            continue
        try:
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
        except ValueError as error:
            raise ValueError(f"{line}: {str(error).lower()}") from None
        if words[:1] in (["hetjob"], ["packjob"]):
            components.append({})
            continue
        while words:
            word = words.pop(0)
            if word.startswith("--"):
                name, is_given, value = word[2:].partition("=")
            else:
                name, value = short.get(word[1:2], word), word[2:].removeprefix("=")
                is_given = value
            if not is_given and words and not words[0].startswith("-"):
                value = words.pop(0)
            components[-1][name] = value
    return components


def _gpus(where: str, given: Mapping[str, str], nodes: int | None, tasks: int) -> dict[str, int]:
    """GPUs of a node by type, however they are asked for."""
    items = [("gres", text.split(":")[1:]) for text in given.get("gres", "").split(",") if text.split(":")[0] == "gpu"]
    per = ("gpus-per-node", "gpus-per-task", "gpus")
    items += [(key, text.split(":")) for key in per for text in given.get(key, "").split(",") if text]
    found: dict[str, int] = {}
    for key, fields in items:
        name = fields[0] if fields and not fields[0].isdecimal() else ""
        text = fields[-1] if fields and (len(fields) > 1 or not name) else "1"
        count = _each(where, key, text, nodes) if key == "gpus" else _count(where, key, text)
        found[name] = found.get(name, 0) + count * (tasks if key == "gpus-per-task" else 1)
    return found


def _each(where: str, option: str, text: str, nodes: int | None) -> int:
    """A node's share of a number that is for all nodes."""
    count = _count(where, option, text)
    if count % (nodes or 1):
        raise ValueError(f"{where}: --{option} {count} does not divide among {nodes} nodes alike")
    return count // (nodes or 1)


def _nodes(text: str) -> int | None:
    least, _, most = text.partition("-")
    return int(least) if least.isdecimal() and most in ("", least) else None


def _count(where: str, option: str, text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{where}: --{option} {text!r} is not a number")
    return int(text)


# --- settings


def _check(config: Config) -> None:
    recipe, site = config["recipe"], config["slurm"]
    if recipe["start"] not in STARTS:
        raise ValueError(f"recipe.start {recipe['start']!r} is not one of {', '.join(STARTS)}")
    limit, ahead = seconds_of(recipe["time"]), recipe["signal_seconds"]
    if not isinstance(ahead, int) or isinstance(ahead, bool) or not 1 <= ahead <= min(MOST_SIGNAL_SECONDS, limit - 1):
        raise ValueError(
            f"recipe.signal_seconds must be an integer from 1 to {MOST_SIGNAL_SECONDS} and less than the time limit, "
            f"{duration(limit)}; got {ahead!r}"
        )
    for key in ("partition", "gres"):
        if not isinstance(site[key], Mapping) or not all(isinstance(v, str) and v for v in site[key].values()):
            raise ValueError(f"slurm.{key} must map device types to names, got {site[key]!r}")
    for key in ("setup", "srun"):
        if not isinstance(site[key], list) or not all(isinstance(line, str) for line in site[key]):
            raise ValueError(f"slurm.{key} must be a list of texts, got {site[key]!r}")
    for key, kind in (("cpus_per_gpu", int), ("memory_gb_per_gpu", (int, float))):
        value = site[key]
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or value <= 0):
            raise ValueError(f"slurm.{key} must be a positive number or null, got {value!r}")
