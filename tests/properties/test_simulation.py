"""Whole systems by a virtual clock: a few worlds here, a million operations in `make simulate`."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.simulation.world import Verdict

ROOT = Path(__file__).parent.parent.parent
SEEDS = (1, 2, 3, 204_271_257)


def played(seed: int) -> Verdict:
    world = subprocess.run(
        [sys.executable, "-m", "benchmarks.simulation", "--world", f"--seed={seed}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        check=False,
    )
    assert world.returncode == 0, world.stderr.decode()
    return msgspec.json.decode(world.stdout, type=Verdict)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_system_under_faults_does_everything_it_was_asked_to(seed: int) -> None:
    verdict = played(seed)
    assert verdict.violations == ()
    assert verdict.jobs > 0
    assert verdict.effects > 0


def test_a_seed_always_plays_the_same_world() -> None:
    assert played(7) == played(7)
