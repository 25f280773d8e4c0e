"""A mini Slurm for a whole session, and others by their layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.mini import Mini, Unavailable

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 400  # that a job may take on a busy machine
LAYOUT = "h100:2:8 a100:2:4 l40s:1:2"


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
