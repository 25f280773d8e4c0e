"""Lightning callbacks: what a run shows, logs and keeps."""

from hexiseq.callbacks.checkpoints import Checkpoints
from hexiseq.callbacks.throughput import Throughput
from hexiseq.callbacks.traces import Traces

__all__ = ["Checkpoints", "Throughput", "Traces"]
