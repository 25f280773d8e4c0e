"""What all tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

import train


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Measurements of this machine are not kept for its user, nor taken from what was kept."""
    os.environ["HEXISEQ_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run ``train.py`` with arguments in this process (what it starts are others): exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        GlobalHydra.instance().clear()
        capfd.readouterr()
        try:
            code = train.start()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        return code, *capfd.readouterr()

    return run
