"""A Lightning script of a user's own on unequal nodes trains as one rank does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.slurm.jobs import ROOT
from tests.slurm.mini import Mini

pytestmark = pytest.mark.slurm
SCRIPT = Path(__file__).parent / "own_script.py"
JOB = """#!/bin/bash
#SBATCH --output=own-%j.out --time=5
#SBATCH --partition=h100 --nodes=1 --ntasks-per-node=2 --gres=gpu:h100:2
#SBATCH hetjob
#SBATCH --partition=a100 --nodes=1 --ntasks-per-node=1 --gres=gpu:a100:1
srun --het-group=0,1 --kill-on-bad-exit=1 "$PYTHON" "$SCRIPT"
"""


def test_a_script_of_ones_own(slurm: Mini, tmp_path: Path) -> None:
    env = {"PYTHON": sys.executable, "SCRIPT": str(SCRIPT), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    (tmp_path / "own.sbatch").write_text(JOB)
    job = slurm.submit("own.sbatch", cwd=tmp_path, env=env)
    # Meanwhile without Slurm.
    alone = subprocess.run([sys.executable, str(SCRIPT)], cwd=tmp_path, env={**os.environ, **env, "HEXISEQ_NODE": "x"},
                           capture_output=True, text=True, timeout=300)  # fmt: skip
    states = slurm.wait(job, 300)
    output = (tmp_path / f"own-{job}.out").read_text()
    assert set(states) == {"COMPLETED"}, output
    losses, wanted = (
        [float(loss) for loss in re.findall(r"^loss (\S+)$", text, re.MULTILINE)] for text in (output, alone.stdout)
    )
    assert len(wanted) == 4, alone.stderr
    assert losses == pytest.approx(wanted, rel=1e-9)
