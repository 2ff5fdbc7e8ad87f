"""`make simulate`: worlds by the seed until so many operations have been made.

    make simulate                      a million operations, with seeds nobody has chosen
    make simulate SEED=7               one world, the same as every time
    make simulate OPERATIONS=20000     a shorter run

Each world is a process of its own: nothing of one leaks into the next, and a world
that fails can be played again by its seed alone.
"""

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from benchmarks.simulation import virtual
from benchmarks.simulation.world import Verdict, simulate

WORLD_OPERATIONS = 5_000
"""Few enough that a world that fails can be understood."""
OPERATIONS = 1_000_000
PARALLEL = 2
WORLD_SECONDS_MAX = 600


@dataclass
class Totals:
    """What all worlds so far add up to."""

    worlds: int = 0
    operations: int = 0
    jobs: int = 0
    effects: int = 0
    virtual_s: float = 0.0
    failed: list[int] = field(default_factory=list)

    def add(self, seed: int, verdict: Verdict | str) -> None:
        self.worlds += 1
        if isinstance(verdict, str):
            print(f"seed {seed}: {verdict}")
            self.failed.append(seed)
            return
        self.operations += verdict.operations
        self.jobs += verdict.jobs
        self.effects += verdict.effects
        self.virtual_s += verdict.virtual_s
        for violation in verdict.violations:
            print(f"seed {seed}: {violation}")
        if verdict.violations:
            self.failed.append(seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seed", type=int, help="play one world, and only that one")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    parser.add_argument("--world", action="store_true", help="this process is the world")
    asked = parser.parse_args()
    if asked.world:
        return play(asked.seed)
    if asked.seed is not None:
        seeds = iter([asked.seed])
    else:
        chance = random.SystemRandom()
        seeds = (chance.randrange(1_000_000_000) for _ in range(asked.operations))
    return asyncio.run(survey(seeds, asked.operations))


def play(seed: int) -> int:
    """One world, in this process; its verdict on the standard output."""
    logging.disable()
    clock = virtual.VirtualClock()
    verdict = virtual.run(seed, clock, simulate(seed, WORLD_OPERATIONS, clock))
    sys.stdout.buffer.write(msgspec.json.encode(verdict))
    sys.stdout.flush()
    # What dead processes have left behind would be torn down one by one.
    os._exit(0)


async def survey(seeds: Iterator[int], operations: int) -> int:
    """Play worlds side by side until there were so many operations, or one has failed."""
    totals = Totals()
    started_s = time.monotonic()
    players = [asyncio.create_task(_player(seeds, operations, totals)) for _ in range(PARALLEL)]
    await asyncio.gather(*players)
    took_s = time.monotonic() - started_s
    print(
        f"{totals.worlds} worlds, {totals.operations:,} operations, {totals.jobs:,} jobs,"
        f" {totals.effects:,} effects, {totals.virtual_s / 3600:,.1f} virtual hours"
        f" in {took_s:,.0f} s ({totals.operations / took_s * 3600:,.0f} operations an hour):"
        f" {len(totals.failed)} failed"
    )
    for seed in totals.failed:
        print(f"again: make simulate SEED={seed}")
    return 1 if totals.failed else 0


async def _player(seeds: Iterator[int], operations: int, totals: Totals) -> None:
    while totals.operations < operations and not totals.failed:
        seed = next(seeds, None)
        if seed is None:
            return
        verdict = await _world(seed)
        totals.add(seed, verdict)


async def _world(seed: int) -> Verdict | str:
    world = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.simulation",
        "--world",
        f"--seed={seed}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        # The order of sets of texts is part of the course a world takes.
        env={**os.environ, "PYTHONHASHSEED": "0"},
    )
    try:
        async with asyncio.timeout(WORLD_SECONDS_MAX):
            out, err = await world.communicate()
    except TimeoutError:
        world.kill()
        await world.wait()
        return f"it did not end within {WORLD_SECONDS_MAX} s"
    try:
        return msgspec.json.decode(out, type=Verdict)
    except msgspec.DecodeError:
        return err.decode(errors="replace")[-4_000:] or "it ended without a verdict"


if __name__ == "__main__":
    sys.exit(main())
