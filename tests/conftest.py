"""What all tests share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Measurements of this machine are not kept for its user, nor taken from what was kept."""
    os.environ["HEXISEQ_CACHE"] = str(tmp_path_factory.mktemp("cache"))
