"""Scripts that produce the numbers of ``docs/results.md``: ``python -m benchmarks.X`` in the repository's root."""
