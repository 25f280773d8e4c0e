"""Lightning callbacks: what a run shows, logs and keeps."""

from hexiseq.callbacks.checkpoints import Checkpoints
from hexiseq.callbacks.throughput import Throughput

__all__ = ["Checkpoints", "Throughput"]
