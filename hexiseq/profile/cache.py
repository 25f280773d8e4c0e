"""What was measured on a machine, kept for its next run: one JSON file for each machine, software and model shape."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import hexiseq
from hexiseq.cluster import Cluster
from hexiseq.workload import ModelShape

MOST_AGE_SECONDS = 30 * 86400
FORMAT = 1  # of what is kept, and of how it is measured


def folder() -> Path:
    """``HEXISEQ_CACHE``, else ``hexiseq`` in the user's cache folder."""
    if own := os.environ.get("HEXISEQ_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hexiseq"


def key(devices: Sequence[str], cores: Sequence[int], ranks: int, dtype: str, shape: ModelShape) -> dict[str, Any]:
    """What rates depend on. Another value of any of it means measuring again.

    Args:
        devices: what the driver calls the GPUs, or the processor.
        cores: this process may run on.
        dtype: as configured.
    """
    sizes = ("hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab", "layers")
    return {
        "format": FORMAT,
        "hexiseq": hexiseq.__version__,
        "torch": torch.__version__,
        "host": socket.gethostname(),
        "devices": list(devices),
        "cores": list(cores),
        "ranks": ranks,
        "dtype": dtype,
        "model": {name: getattr(shape, name) for name in sizes},
    }


def path_of(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{key['host']}-{digest}.json"


def load(key: Mapping[str, Any]) -> tuple[dict[str, Any], float] | None:
    """The cluster kept under this key, and its age in seconds; None where there is none that can be used."""
    try:
        kept = json.loads(path_of(key).read_text())
        age = time.time() - kept["time"]
        if kept["key"] != key or not 0 <= age <= MOST_AGE_SECONDS:
            return None
        Cluster.from_config(kept["cluster"])
        return dict(kept["cluster"]), age
    except (OSError, ValueError, KeyError, TypeError):  # absent, or not what we write
        return None


def store(key: Mapping[str, Any], cluster: Mapping[str, Any]) -> str | None:
    """Keep a cluster; all of it or nothing, whoever else writes. Returns why that is not possible, None if it was."""
    path = path_of(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError as error:
        return f"{path.parent}: {error.strerror or error}"
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"key": key, "time": time.time(), "cluster": cluster}, file)
        os.replace(draft, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        return f"{path}: {error.strerror or error}"
    return None
