"""From a cluster and a workload to a plan."""

from hexiseq.schedule.modes import modes, solve_modes
from hexiseq.schedule.solve import IllegalPolicy, solve

__all__ = ["IllegalPolicy", "modes", "solve", "solve_modes"]
