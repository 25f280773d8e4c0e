"""Lightning callbacks: what a run shows and logs."""

from hexiseq.callbacks.throughput import Throughput

__all__ = ["Throughput"]
