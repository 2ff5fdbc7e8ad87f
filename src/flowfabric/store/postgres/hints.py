"""Hints between processes, over LISTEN and NOTIFY.

A NOTIFY makes committing transactions queue up, so it is seldom part of one: a
background task sends the topics of many transactions in one message, once
in a hundredth of a second. The first after a rest travels with the statement that
commits, when no other queues, and so does what a transaction announces. Losing one
costs a poll.

Behind a transaction-mode pooler LISTEN succeeds and nothing ever arrives. So a
new listening connection proves itself first: a message sent through the pool
must come back. Until it does, the board is not live and listeners poll.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from flowfabric.errors import FlowFabricError
from flowfabric.outages import first_of
from flowfabric.store.hints import EVERY_TOPIC, HintBoard
from flowfabric.store.postgres.driver import DRIVER_ERRORS, Connection
from flowfabric.store.postgres.pool import Connections
from flowfabric.store.postgres.statements import CHANNEL

PAYLOAD_MAX_BYTES: Final = 7900
PAYLOADS_MAX: Final = 16
"""Messages that are sent at once: about three thousand streams that were appended to."""
SEND_INTERVAL_S: Final = 0.01
LISTEN_AFTER_S: Final = 0.05
"""What is waited for so briefly is found by asking before a connection could be made."""
PROOF_TIMEOUT_S: Final = 2.0
HEALTH_INTERVAL_S: Final = 15.0
"""A network that falls silent is noticed by the kernel, or by a statement under way."""
HEALTH_TIMEOUT_S: Final = 3.0
SUSPECT_TIMEOUT_S: Final = 1.0
"""How long a listening connection may take to answer once others have fallen silent."""
RECONNECT_FIRST_S: Final = 0.1
RECONNECT_MAX_S: Final = 5.0
PROVE_AGAIN_S: Final = 30.0
"""How long a pooler that lets nothing through is left alone."""

# A hint is not worth a flush to disk.
_NOTIFY: Final = (
    "select set_config('synchronous_commit', 'off', true), pg_notify($1, payload)"
    " from unnest($2::text[]) as payload"
)
ANNOUNCE: Final = "select pg_notify($1, payload) from unnest($2::text[]) as payload"
_PROOF: Final = "?"

# A hint may be lost. Whatever is wrong with the database, the next operation says so.
_EXPECTED: Final = (*DRIVER_ERRORS, FlowFabricError)


def hint_payloads(origin: str, topics: set[str]) -> list[str]:
    """Messages that hint `topics`; their sender knows them by their origin.

    Too many topics are all of them, which wakes everybody: a last resort.
    """
    payloads: list[str] = []
    size = PAYLOAD_MAX_BYTES
    for topic in sorted(topics):
        added = len(topic.encode()) + 1
        if size + added > PAYLOAD_MAX_BYTES:
            payloads.append(origin)
            size = len(origin)
        payloads[-1] += f"\n{topic}"
        size += added
    return payloads if len(payloads) <= PAYLOADS_MAX else [f"{origin}\n{EVERY_TOPIC}"]


class HintExchange:
    """Sends this process's hints to others and puts theirs on the board."""

    def __init__(self, board: HintBoard, connections: Connections) -> None:
        self._board = board
        self._board.live = False
        self._connections = connections
        # What swallows statements swallows hints as well, unnoticed.
        self._suspicious = asyncio.Event()
        connections.on_suspicion = self._suspicious.set
        self._origin = uuid.uuid4().hex
        self._outgoing: set[str] = set()
        self._has_outgoing = asyncio.Event()
        self._rests_from_s = 0.0
        """Since when nothing would be held up by a message, if nothing is being sent."""
        self._proof = asyncio.Event()
        self._has_worked = False
        """Whether anything has come through the listening connection there is."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []
        self._board.live = False
        if self._outgoing:
            with suppress(*_EXPECTED):
                await self._notify(self._outgoing)

    def publish(self, topics: set[str]) -> None:
        """Wake listeners here at once and those elsewhere soon."""
        self._board.publish(topics)
        outgoing = self._board.for_others(topics)
        if outgoing:
            self._outgoing |= outgoing
            self._has_outgoing.set()

    def payloads(self, topics: set[str]) -> list[str]:
        """Messages of this process, for a transaction to send with its commit."""
        return hint_payloads(self._origin, topics)

    def take_along(self, topics: Collection[str]) -> str | None:
        """A message for a statement to send when it commits; None if it had better not.

        Those who listen here are not told by it.
        """
        now_s = time.monotonic()
        if not topics or self._outgoing or now_s < self._rests_from_s:
            return None
        payloads = hint_payloads(self._origin, self._board.for_others(topics))
        if len(payloads) != 1:
            return None
        self._rests_from_s = now_s + SEND_INTERVAL_S
        return payloads[0]

    def take_back(self) -> None:
        """The statement had nothing to tell: the next one may take a message along at once."""
        self._rests_from_s = 0.0

    # Sending --------------------------------------------------------------

    async def _send(self) -> None:
        while True:
            await self._has_outgoing.wait()
            await asyncio.sleep(self._rests_from_s - time.monotonic())
            self._has_outgoing.clear()
            topics, self._outgoing = self._outgoing, set()
            self._rests_from_s = time.monotonic() + SEND_INTERVAL_S
            try:
                with suppress(*_EXPECTED):
                    await self._notify(topics)
            except asyncio.CancelledError:
                # `stop` sends it, perhaps once more.
                self._outgoing |= topics
                raise
            self._rests_from_s = time.monotonic() + SEND_INTERVAL_S

    async def _notify(self, topics: set[str]) -> None:
        payloads = hint_payloads(self._origin, topics)
        async with self._connections.acquire() as connection:
            await connection.execute(_NOTIFY, CHANNEL, payloads, timeout=HEALTH_TIMEOUT_S)

    # Receiving ------------------------------------------------------------

    async def _receive(self) -> None:
        pause_s = RECONNECT_FIRST_S
        while True:
            await self._board.has_waiting.wait()
            if (left_s := LISTEN_AFTER_S - self._board.waited_s) > 0:
                await asyncio.sleep(left_s)
                continue
            self._has_worked = False
            try:
                await self._listen_until_lost()
            except _EXPECTED:
                pause_s = min(pause_s * 2, RECONNECT_MAX_S)
            else:
                pause_s = min(pause_s * 2, PROVE_AGAIN_S)
            if self._has_worked:
                pause_s = RECONNECT_FIRST_S
            self._board.live = False
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _listen_until_lost(self) -> None:
        """Listen on a connection of our own, unless nothing comes through it."""
        connection = await self._connections.connect_to_listen(HEALTH_TIMEOUT_S)
        lost = asyncio.Event()
        connection.add_termination_listener(lambda _: lost.set())
        try:
            await connection.add_listener(CHANNEL, self._received)
            if not await self._proves_itself():
                return
            self._has_worked = self._board.live = True
            # What was hinted before this moment may have been missed.
            self._board.publish([EVERY_TOPIC])
            await self._until_lost(connection, lost)
        finally:
            connection.terminate()

    async def _proves_itself(self) -> bool:
        self._proof.clear()
        await self._notify({_PROOF})
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                await self._proof.wait()
        except TimeoutError:
            return False
        return True

    def _received(self, connection: Connection, pid: int, channel: str, payload: object) -> None:
        origin, *topics = str(payload).split("\n")
        if origin != self._origin:
            self._board.publish(topics)
        elif topics == [_PROOF]:
            self._proof.set()

    async def _until_lost(self, connection: Connection, lost: asyncio.Event) -> None:
        """Return when the connection has ended; a silent one is asked now and then."""
        while not lost.is_set():
            await first_of(lost.wait(), self._suspicious.wait(), timeout_s=HEALTH_INTERVAL_S)
            if lost.is_set():
                return
            timeout_s = HEALTH_TIMEOUT_S
            if self._suspicious.is_set():
                # Until it answers no listener relies on it: hints may have been swallowed already.
                self._board.live = False
                self._board.publish([EVERY_TOPIC])
                timeout_s = SUSPECT_TIMEOUT_S
            self._suspicious.clear()
            await self._ask(connection, timeout_s)
            self._board.live = True

    async def _ask(self, connection: Connection, timeout_s: float) -> None:
        try:
            await connection.execute("select 1", timeout=timeout_s)
        except TimeoutError:
            self._connections.suspect()
            raise
