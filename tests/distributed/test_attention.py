"""Attention over uneven plans against one process: results, gradients, checkpointing, failures."""

from __future__ import annotations

import attention_cases as cases
import pytest

SEEDS = range(48)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plan_in_float64(pools, seed):
    plan = cases.draw_plan(seed)
    results = pools(plan.world_size).run(cases.check, plan, 1 + seed % 2, 8, seed, seed % 4 != 3)
    for rank, (errors, _) in enumerate(results):
        assert max(errors) <= 1e-12, f"rank {rank}: {dict(zip(cases.NAMES, errors, strict=True))}\n{plan.to_dict()}"
