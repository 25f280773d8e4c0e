"""A mini Slurm for a whole session, and others by their layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.slurm import Component
from tests.slurm.jobs import (
    FIRST_STEPS,
    LAYOUT,
    NODES,
    ROOT,
    SECONDS,
    TOTAL_STEPS,
    TWO_AND_ONE,
    checkout_in,
    cluster,
    losses,
    write,
)
from tests.slurm.mini import Mini, Unavailable


def _mini(layout: str, *, running: bool) -> Mini:
    try:
        return Mini(layout, running=running)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def slurm() -> Iterator[Mini]:
    """Running, with the nodes of `LAYOUT`."""
    with _mini(LAYOUT, running=True) as mini:
        yield mini


@pytest.fixture(scope="session")
def asleep() -> Iterator[Callable[[str], Mini]]:
    """One of a layout, which judges requests for any number of nodes and runs no job."""
    made: dict[str, Mini] = {}

    def make(layout: str) -> Mini:
        if layout not in made:
            made[layout] = _mini(layout, running=False)
        return made[layout]

    yield make
    for mini in made.values():
        mini.stop()


@pytest.fixture(scope="session")
def cut_off(slurm: Mini) -> Iterator[int]:
    """A port at which nodes with A100s reach nobody."""
    port, nodes = 23456, [f"a100-{i + 1}" for i in range(NODES)]
    rule = ("to", "0.0.0.0/0", "ipproto", "tcp", "dport", str(port), "prohibit")
    for node in nodes:
        slurm.call("ip", "rule", "add", *rule, node=node)
    yield port
    for node in nodes:
        slurm.call("ip", "rule", "delete", *rule, node=node)


@pytest.fixture(scope="session")
def early(slurm: Mini, cut_off: int, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, Path]]:
    """Jobs that tests only wait for, submitted at once: some that are not the cluster, one whose first node cannot be
    reached, and one of twelve ranks. Each is known by its number and its folder."""

    def other(number: int, **what: Any) -> Callable[[list[Component]], list[Component]]:
        return lambda parts: [replace(part, **what) if i == number else part for i, part in enumerate(parts)]

    odd: dict[str, tuple[Callable[[list[Component]], list[Component]], list[str], str]] = {
        "smaller": (other(0, gpus={"h100": 1}), [], "agents"),
        "larger": (other(0, gpus={"h100": 3}), [], "agents"),
        "absent": (other(1, partition="l40s", gpus={"l40s": 1}), [], "agents"),
        "replanned": (other(0, gpus={"h100": 1}, tasks=1), ["launch.mismatch=replan"], "tasks"),
        "unreachable": (list, ["launch.timeout_seconds=20"], "agents"),
    }
    jobs = {name: (change, [*FIRST_STEPS, *arguments], start) for name, (change, arguments, start) in odd.items()}
    jobs["twelve"] = list, [*cluster(8, 4), "trainer.max_steps=1", TOTAL_STEPS], "torchrun"
    submitted: dict[str, tuple[int, Path]] = {}
    for name, (change, arguments, start) in jobs.items():
        folder = checkout_in(tmp_path_factory.mktemp(name))
        env = {"MASTER_PORT": str(cut_off)} if name == "unreachable" else {}
        submitted[name] = slurm.submit(write(folder, arguments, start, change), cwd=folder, env=env), folder
    return submitted


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder to submit from."""
    return checkout_in(tmp_path)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same job in three ranks of one machine, without Slurm and without a break."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, str(ROOT / "train.py"), *TWO_AND_ONE, f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=SECONDS)
    return losses(folder)
