"""`python -m tests.properties.many_flows --count 10000 --seed 1`: many wild flows in a row.

Flow number n of a seed is always the same; `--only n` plays it alone.
"""

import argparse
import asyncio
import random
import time

from flowfabric import Engine
from flowfabric.testing import SettableClock
from tests.properties.crashes import Crashes, CrashingSqlite
from tests.properties.wild_flows import CONFIG, WildFlow, play

FLOWS_PER_STORE = 250
STEPS = (15, 45)
TELL_EVERY = 500


async def play_some(seed: int, numbers: range) -> int:
    """Play these flows one after the other in one database; tell how often they crashed."""
    crashes, clock = Crashes(), SettableClock()
    store = CrashingSqlite(crashes, clock)
    engine = await Engine.open(store, CONFIG)
    try:
        for number in numbers:
            chance = random.Random(f"{seed}/{number}")
            flow = WildFlow(chance, store, crashes, clock)
            try:
                await play(flow, engine, chance.randint(*STEPS))
            except Exception as error:
                error.add_note(f"flow {number} of seed {seed}")
                raise
    finally:
        await engine.close()
    return crashes.happened


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    if options.only is not None:
        asyncio.run(play_some(options.seed, range(options.only, options.only + 1)))
        return
    began, crashes = time.monotonic(), 0
    for first in range(0, options.count, FLOWS_PER_STORE):
        numbers = range(first, min(first + FLOWS_PER_STORE, options.count))
        crashes += asyncio.run(play_some(options.seed, numbers))
        if numbers.stop % TELL_EVERY == 0 or numbers.stop == options.count:
            taken = time.monotonic() - began
            print(f"{numbers.stop} flows, {crashes} crashes, {taken:.0f} s", flush=True)


if __name__ == "__main__":
    main()
