"""Tests that need torch, each module in a process of its own: this one never imports torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TORCH_SIDE = Path(__file__).parents[1] / "torch_side"
DEADLINE_S = 600


@pytest.mark.parametrize("module", sorted(TORCH_SIDE.glob("test_*.py")), ids=lambda module: module.stem)
def test_torch_side(module: Path) -> None:
    """Every test of the module passes; if not, its own report is the failure's message."""
    run = subprocess.run(
        # Explicit paths, as this project's pytest options keep the directory out of an ordinary collection.
        [sys.executable, "-m", "pytest", str(module), "-p", "no:cacheprovider", "-q", "--color=no"],
        # No plugin is loaded by itself, so that what is tested here does not depend on what is installed.
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=TORCH_SIDE.parents[1],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if run.returncode:
        pytest.fail(f"{module.name} ended with exit code {run.returncode}:\n{run.stdout}", pytrace=False)
