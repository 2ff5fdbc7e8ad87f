"""Calls of branches that may share their items: what they stand for once others have come to rest.

Which calls are in doubt, and what they stand for, the core decides: see `core.pools`. Here they
wait for what other branches of their pool do outside of steps, which may take its time.
"""

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from flowfabric.core import journal
from flowfabric.core.pools import Burst, Pool
from flowfabric.worker.leases import clock_s
from flowfabric.worker.lines import DurableCall, Line
from flowfabric.worker.moved_calls import Moves
from flowfabric.worker.parking import Turns

PATIENCE_S: Final = 2.0
"""How long a call waits for the branch that has stored what looks like it."""
NUMBER_PATIENCE_S: Final = 10.0
"""The same, where nothing but its number in its branch tells what it stands for."""
EXCHANGED_PATIENCE_S: Final = 0.2
"""The same, where branches are known to share their items."""
LOOK_FIRST_S: Final = 0.002
LOOK_AGAIN_S: Final = 0.05


class _Looks:
    """Looks again and again, less and less often."""

    def __init__(self) -> None:
        self._began_s = clock_s()
        self._pause_s = LOOK_FIRST_S

    async def again(self, patience_s: float) -> bool:
        """Wait for the next look; False if there was patience for no more."""
        if clock_s() >= self._began_s + patience_s:
            return False
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(LOOK_AGAIN_S, 2 * self._pause_s)
        return True


class Pools:
    """The pools of one run, and the calls in doubt."""

    def __init__(
        self,
        turns: Turns,
        moves: Moves,
        steps_of: Callable[[str], journal.Shelf],
        lines_at: Callable[[str], journal.Shelf],
    ) -> None:
        self._turns = turns
        self._moves = moves
        self._steps_of = steps_of
        self._lines_at = lines_at
        self._stored: dict[tuple[str, str], list[str]] = {}
        self._pools: dict[tuple[str, str], Pool] = {}
        self._doubts: list[DurableCall] = []
        moves.in_doubt = self._lines_in_doubt

    def take_in(self, lines: Collection[str]) -> None:
        """Know the lines of which something is stored."""
        self._stored = journal.pooled(lines)

    def at(self, group: str, label: str) -> Pool | None:
        """What is stored of the lines of one coroutine function that were started at one place."""
        stored = self._stored.get((group, label))
        if stored is None:
            return None
        if (group, label) not in self._pools:
            made = Pool({line: self._steps_of(line) for line in stored})
            self._pools[group, label] = made
            self._note(made)
        return self._pools[group, label]

    async def out_of_doubt(self, call: DurableCall) -> None:
        """Wait until it is certain what a call of a branch stands for."""
        for line in reversed(list(call.line.and_above())):
            if line.is_guessed():
                await self._until_others_rest(line)
        if call.line.in_doubt(call) is None:
            return
        self._doubts.append(call)
        try:
            await self._until_placed(call)
        finally:
            self._doubts.remove(call)

    async def _until_others_rest(self, line: Line) -> None:
        """Wait for branches that may have taken the item for which a line was started."""
        with self._turns.in_doubt():
            looks = _Looks()
            while line.is_guessed():
                await self._turns.doubt()
                if not await looks.again(PATIENCE_S):
                    return

    async def _until_placed(self, call: DurableCall) -> None:
        with self._turns.in_doubt():
            looks = _Looks()
            while (burst := call.line.in_doubt(call)) is not None:
                await self._turns.doubt()
                if await looks.again(self._patience_s(call.line, burst)):
                    continue
                if not self._settle(call):
                    await asyncio.sleep(LOOK_AGAIN_S)

    def _patience_s(self, line: Line, burst: Burst) -> float:
        """How long a call in doubt waits for what others do outside of steps."""
        parent, pool = line.parent, line.pool
        if parent is None or pool is None:
            return 0.0
        owners = pool.owners(burst)
        if self._moves.is_beside_work(line):
            if pool.exchanged and not pool.is_claimed(burst):
                return EXCHANGED_PATIENCE_S
            return PATIENCE_S if owners and not pool.exchanged else NUMBER_PATIENCE_S
        started_here = self._lines_at(journal.group_of(line.known_as))
        may_start = self._moves.is_at_work(parent) and any(map(started_here.holds, owners))
        return PATIENCE_S if may_start else 0.0

    def _settle(self, call: DurableCall) -> bool:
        """Place what is in doubt in the pool of a call, as far as that can be."""
        pool = call.line.pool
        if pool is None:
            return False
        waiting = {each.line.known_as: each for each in self._doubts if each.line.pool is pool}
        found = (each.line.in_doubt(each) for each in waiting.values())
        bursts = [burst for burst in found if burst is not None]
        lines = pool.settle(bursts, self._turns.others_go_on)
        for line in lines:
            waiting[line].line.place(waiting[line])
        self._note(pool)
        return bool(lines)

    def _lines_in_doubt(self) -> Collection[str]:
        pools = (call.line.pool for call in self._doubts)
        return {line for pool in pools if pool is not None for line in pool.lines}

    def _note(self, pool: Pool) -> None:
        if pool.exchanged:
            self._moves.shared.update(pool.lines)

    def let_go(self) -> None:
        """Drop references back to the journal and its lines."""
        self._doubts.clear()
        self._steps_of = self._lines_at = _nothing


def _nothing(where: str) -> journal.Shelf:
    return journal.Shelf(())
