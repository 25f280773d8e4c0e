"""A mini Slurm for a whole session, and others by their layout."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.jobs import LAYOUT, ROOT, SECONDS, TWO_AND_ONE, losses
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder to submit from, as a checkout of the repository is one."""
    for name in ("train.py", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the same job in three ranks of one machine, without Slurm and without a break."""
    folder = tmp_path_factory.mktemp("plain")
    command = [sys.executable, str(ROOT / "train.py"), *TWO_AND_ONE, f"hydra.run.dir={folder}"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=SECONDS)
    return losses(folder)
