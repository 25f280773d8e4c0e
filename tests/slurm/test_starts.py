"""Jobs that other tests run in part: each way to start ranks, and a rehearsal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.jobs import FIRST_STEPS, SECONDS, finish, first_steps, kinds, write
from tests.slurm.mini import Mini

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("start", ["agents", "tasks", "torchrun"])
@pytest.mark.parametrize("small_first", [True, False])
def test_three_ranks_on_two_nodes_compute_what_three_on_one_do(
    slurm: Mini, checkout: Path, plain: dict[int, float], start: str, small_first: bool
) -> None:
    # Nodes sort as a100-1, h100-1: where the large one comes first that is not the order of the ranks.
    path = write(checkout, FIRST_STEPS, start, lambda parts: parts[::-1] if small_first else parts)
    state, output = finish(slurm, slurm.submit(path, cwd=checkout), checkout)
    assert state == "COMPLETED", output
    (run_dir,) = (checkout / "outputs").iterdir()
    assert first_steps(run_dir) == pytest.approx(first_steps(plain), rel=1e-5)
    expected = ["h100_sxm", "h100_sxm", "a100_80"]
    assert kinds(run_dir) == (expected[::-1] if small_first else expected)
    assert len(list((run_dir / "logs").glob("rank*.log"))) == 3


def test_a_rehearsal_runs(slurm: Mini, checkout: Path) -> None:
    few = ("trainer.max_steps=2", "trainer.validation_sequences=0", "data=synthetic", "data.seq_len=512",
           "model=tiny_llama", "cluster.nodes.0.devices.0.count=2", "cluster.nodes.1.devices.0.count=1")  # fmt: skip
    job = slurm.submit("slurm/rehearse.sbatch", "--", *few, cwd=checkout)
    states = slurm.wait(job, SECONDS)
    output = (checkout / f"rehearse-{job}.out").read_text()
    assert states == ["COMPLETED"], output
    assert "REHEARSAL" in output
    assert "step 2/2" in output
    assert (checkout / "outputs" / f"slurm-{job}" / "plan.target.json").exists()
