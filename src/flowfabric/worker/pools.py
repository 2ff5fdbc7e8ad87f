"""Calls of branches that may share their items: what they stand for once others have come to rest.

The core decides which calls are in doubt, and what they stand for: see `core.pools`. Here they
wait for what other branches of their pool do outside of steps, which may take a while.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Self

from flowfabric.core import journal
from flowfabric.core.pools import Burst, Pool
from flowfabric.worker.branches import DurableCall, Line
from flowfabric.worker.leases import clock_s
from flowfabric.worker.moved_calls import KeptSteps, Moves
from flowfabric.worker.turns import Turns, end_turn

PATIENCE_S: Final = 2.0
"""How long a call waits for the branch that stored a step that looks like it."""
NUMBER_PATIENCE_S: Final = 10.0
"""The same, if only its number in its branch says which step it matches."""
EXCHANGED_PATIENCE_S: Final = 0.2
"""The same, where branches are known to share their items."""
LOOK_FIRST_S: Final = 0.002
LOOK_AGAIN_S: Final = 0.05


def looks_in(patience_s: float) -> int:
    """The least number of looks in that time; twice as many if nothing else happens."""
    return int(patience_s / LOOK_AGAIN_S / 2)


class Patience:
    """How long a call waits for others: a time, and a number of looks at them."""

    def __init__(self) -> None:
        self._until_s = clock_s() + PATIENCE_S
        self._looks_left = looks_in(PATIENCE_S)

    def is_over(self) -> bool:
        """To be asked at every look."""
        self._looks_left -= 1
        return self._looks_left < 0 and clock_s() > self._until_s


class _Doubt:
    """A call while it is unclear which step it matches. Use as a context."""

    def __init__(self, turns: Turns, call: DurableCall) -> None:
        self._turns = turns
        self.call = call
        self._began_s = clock_s()
        self._looks = 0
        self._pause_s = LOOK_FIRST_S
        self._nap: asyncio.Future[None] | None = None
        self.is_over = False

    def __enter__(self) -> Self:
        self._turns.doubts += 1
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def end(self) -> None:
        """It is certain now: the next call may continue at once."""
        if not self.is_over:
            self.is_over = True
            self._turns.doubts -= 1
            end_turn(self._nap)

    async def look_again(self, patience_s: float) -> bool:
        """Wait for the next look; False if there is patience for no more."""
        self._looks += 1
        # On a busy machine little happens between two looks.
        if clock_s() >= self._began_s + patience_s and self._looks > looks_in(patience_s):
            return False
        await self.nap(self._pause_s)
        self._pause_s = min(LOOK_AGAIN_S, 2 * self._pause_s)
        return True

    async def nap(self, pause_s: float = LOOK_AGAIN_S) -> None:
        if not self.is_over:
            loop = asyncio.get_running_loop()
            self._nap = loop.create_future()
            timer = loop.call_later(pause_s, end_turn, self._nap)
            try:
                await self._nap
            finally:
                timer.cancel()


class Pools:
    """The pools of one run, and the calls in doubt."""

    def __init__(self, turns: Turns, moves: Moves, stored: KeptSteps) -> None:
        self._turns = turns
        self._moves = moves
        self._kept = stored
        self._stored = journal.pooled(stored.by_line)
        self._pools: dict[tuple[str, str], Pool] = {}
        self._doubts: dict[_Doubt, None] = {}
        moves.in_doubt = self._lines_in_doubt

    def at(self, group: str, label: str) -> Pool | None:
        """What is stored of the lines of one coroutine function that were started at one place."""
        stored = self._stored.get((group, label))
        if stored is None:
            return None
        if (group, label) not in self._pools:
            made = Pool({line: self._kept.of_line(line) for line in stored})
            self._pools[group, label] = made
            self._note(made)
        return self._pools[group, label]

    async def out_of_doubt(self, call: DurableCall) -> None:
        """Wait until it is certain what a call of a branch stands for."""
        for line in reversed(list(call.line.and_above())):
            if line.is_guessed():
                await self._until_others_rest(line, call)
            # Look at once: a moment later another branch may be between two calls.
            line.identify()
        if call.line.in_doubt(call) is not None:
            with self._doubting(call) as doubt:
                await self._until_placed(doubt)

    @contextmanager
    def _doubting(self, call: DurableCall) -> Iterator[_Doubt]:
        with _Doubt(self._turns, call) as doubt:
            self._doubts[doubt] = None
            try:
                yield doubt
            finally:
                self._doubts.pop(doubt, None)

    async def _until_others_rest(self, line: Line, call: DurableCall) -> None:
        """Wait for branches that may have taken the item for which a line was started."""
        with self._doubting(call) as doubt:
            while line.is_guessed():
                await self._turns.doubt()
                if not await doubt.look_again(PATIENCE_S):
                    return

    async def _until_placed(self, doubt: _Doubt) -> None:
        line = doubt.call.line
        while True:
            await self._turns.doubt()
            burst = line.in_doubt(doubt.call)
            if burst is None:
                return
            if await doubt.look_again(self._patience_s(line, burst)):
                continue
            if line.pool is None or not self._settle(line, line.pool):
                await doubt.nap()

    def _patience_s(self, line: Line, burst: Burst) -> float:
        """How long a call in doubt waits for what others do outside of steps."""
        parent, pool = line.parent, line.pool
        if parent is None or pool is None:
            return 0.0
        owners = pool.owners(burst)
        # Any branch may be about to add an item to what these share.
        beside = self._moves.is_beside_work(line) if owners else self._moves.at_work()
        if beside:
            if pool.exchanged and not pool.is_claimed(burst):
                return EXCHANGED_PATIENCE_S
            return PATIENCE_S if owners and not pool.exchanged else NUMBER_PATIENCE_S
        started_here = self._kept.lines_at(journal.group_of(line.known_as))
        may_start = self._moves.is_at_work(parent) and any(map(started_here.holds, owners))
        return PATIENCE_S if may_start else 0.0

    def _settle(self, line: Line, pool: Pool) -> bool:
        """Place the calls in doubt of a line's pool, as far as possible."""
        waiting = {each.call.line.known_as: each for each in self._doubts_in(pool)}
        found = (each.call.line.in_doubt(each.call) for each in waiting.values())
        bursts = [burst for burst in found if burst is not None]
        lines = pool.resolve(bursts, lambda: self._others_go_on(line))
        for each in lines:
            call = waiting[each].call
            call.line.place(call)
        for doubt in self._doubts_in(pool):
            if doubt.call.line.in_doubt(doubt.call) is None:
                doubt.end()
        self._note(pool)
        return bool(lines)

    def _others_go_on(self, line: Line) -> bool:
        """Whether a branch that is not in doubt may still ask for something, by itself."""
        # In any pool: branches in doubt wait for others themselves.
        in_doubt = {each.call.line for each in self._doubts if not each.is_over}
        return self._turns.run_held() or self._moves.has_calls_beside(line, in_doubt)

    def _doubts_in(self, pool: Pool) -> Iterable[_Doubt]:
        return (each for each in self._doubts if each.call.line.pool is pool)

    def _lines_in_doubt(self) -> Collection[str]:
        pools = (each.call.line.pool for each in self._doubts)
        return {line for pool in pools if pool is not None for line in pool.lines}

    def _note(self, pool: Pool) -> None:
        if pool.exchanged:
            self._moves.shared.update(pool.lines)

    def let_go(self) -> None:
        """Drop references back to the journal and its lines."""
        self._doubts.clear()
