"""Imports point one way, and optional or heavy packages are imported in one place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hexiseq"

# Module (or package) of hexiseq -> hexiseq modules it may import. A package may import itself.
ALLOWED = {
    "plan": set(),
    "cluster": {"plan"},
    "workload": {"plan"},
    "cost": {"plan", "cluster", "workload"},
    "schedule": {"plan", "cluster", "workload", "cost"},
    "simulate": {"plan", "cluster", "workload", "cost"},
    "picture": {"plan", "cluster", "workload", "cost", "simulate"},
    "rehearsal": {"plan", "cluster"},
    "testbed": {"cluster"},
    "launch": {"plan", "cluster", "testbed", "doctor"},
    "doctor": {"plan"},
    "preflight": {"plan", "attention", "doctor"},
    "profile": {"plan", "cluster", "workload", "attention", "doctor"},
    "testing": {"plan"},
    "standins": set(),
    "attention": {"plan"},
    "offload": set(),
    "models": {"plan", "attention", "offload"},
    "documents": {"plan"},
    "data": {"plan", "documents"},
    "environment": {"launch"},
    "strategy": {
        "plan",
        "cluster",
        "workload",
        "schedule",
        "attention",
        "models",
        "data",
        "launch",
        "doctor",
        "preflight",
    },
    "module": {"plan", "models", "strategy"},
    "callbacks": {"plan", "workload", "attention", "strategy"},
    "__init__": {"strategy"},
}
# Third-party package -> the only places that may import it.
BORDERS = {
    "mip": {"schedule"},
    "flash_attn": {"attention"},
    "flash_attn_interface": {"attention"},
    "hydra": set(),
    "wandb": set(),
    "matplotlib": {"picture"},
}
WITHOUT_TORCH = ("plan", "cluster", "workload", "cost", "schedule", "simulate", "documents", "rehearsal", "picture")


def imports(path: Path) -> set[str]:
    """Dotted names a file imports anywhere, at the top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part(path)
    names = imports(path)
    used = {name.split(".")[1] for name in names if name.startswith("hexiseq.")} - {own}
    assert used <= ALLOWED[own], f"{path.name} imports {sorted(used - ALLOWED[own])}"
    for package, places in BORDERS.items():
        if any(name.split(".")[0] == package for name in names):
            assert own in places, f"{path.name} imports {package}; only {sorted(places)} may"


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_planner_does_not_import_torch(name: str) -> None:
    code = f"import sys, hexiseq.{name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_only_train_and_recipes_import_hydra() -> None:
    for folder in ("hexiseq", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not any(name.split(".")[0] in ("hydra", "omegaconf") for name in imports(path)), path
