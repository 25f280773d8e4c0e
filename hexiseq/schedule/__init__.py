"""From a cluster and a workload to a plan."""

from hexiseq.schedule.solve import IllegalPolicy, solve

__all__ = ["IllegalPolicy", "solve"]
