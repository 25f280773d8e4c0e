"""Worker pools, one per world size, started when first asked for and shared by all tests of the session."""

from __future__ import annotations

import pytest

from hexiseq.testing import Pool


@pytest.fixture(scope="session")
def pools():
    made: dict[int, Pool] = {}

    def get(world_size: int) -> Pool:
        if world_size not in made:
            made[world_size] = Pool(world_size)
        return made[world_size]

    yield get
    for pool in made.values():
        pool.close()
