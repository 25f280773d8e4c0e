"""The paper's settings: the rows of the suite, and what every policy may choose from in each."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import yaml

from recipes.job import CONF

FAMILIES = ("testbed", "simulation", "flops", "batch")
NICS = (1, 4, 8)
# What every policy may choose from, keys of `strategy`: what is kept for backward, and whether gathered parameters are.
MODES: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective", "keep_parameters": False},
    "selective, kept": {"recompute": "selective", "keep_parameters": True},
    "full": {"recompute": "full", "keep_parameters": False},
}
# Mixed cluster -> the one of A100 alone with as many FLOPs, counting an H100 as three A100.
MATCHED = {"paper_flops_56": "paper_flops_152", "paper_flops_64": "paper_flops_168"}
NOT_EVEN = ("hexiseq", "fast_only")  # rows of `Plan.rivals` that are no even split over all devices

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One setting: a cluster with so many NICs of 25 GB/s in each node, a model, so many sequences of a length."""

    family: str
    cluster: str
    model: str
    seq_len: int
    sequences: int
    nics: int

    @property
    def key(self) -> str:
        return f"{self.cluster} {self.model} {self.seq_len} x{self.sequences} nics={self.nics}"

    @property
    def overrides(self) -> list[str]:
        return [
            f"+cluster={self.cluster}",
            f"model={self.model}",
            f"data.seq_len={self.seq_len}",
            f"trainer.sequences={self.sequences}",
            f"paper.nics={self.nics}",
        ]


def all_rows() -> list[Row]:
    """Every row of every family, those with the family's own number of NICs first."""
    found = []
    for family in FAMILIES:
        experiment = yaml.safe_load((CONF / "experiment" / f"paper_{family}.yaml").read_text())
        sweep = experiment["hydra"]["sweeper"]["params"]
        axes = (str(sweep[key]).split(",") for key in ("+cluster", "model", "data.seq_len"))
        for (cluster, model, length), nics in itertools.product(itertools.product(*axes), NICS):
            found.append(Row(family, cluster, model, int(length), experiment["trainer"]["sequences"], nics))
    return sorted(found, key=lambda row: row.nics != main_nics(row.cluster))


@functools.cache
def main_nics(cluster: str) -> int:
    """NICs per node in the main figures, as the cluster's file has them."""
    return yaml.safe_load((CONF / "cluster" / f"{cluster}.yaml").read_text())["paper"]["nics"]
