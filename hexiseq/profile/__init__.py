"""Measure the devices and links of a job and describe them as a cluster: what a plan is made from.

`time_calls` and `measure_links` run on every rank of the job at one time; `describe` turns what all of them found into
a cluster; `cache` keeps it for the next run on the same machine.
"""

from __future__ import annotations

from hexiseq.profile.describe import Survey, describe
from hexiseq.profile.links import measure_links
from hexiseq.profile.rates import measured, set_up, time_calls

__all__ = ["Survey", "describe", "measure_links", "measured", "set_up", "time_calls"]
