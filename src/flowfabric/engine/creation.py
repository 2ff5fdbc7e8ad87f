"""Creating executions.

A batch is checked whole before anything is written, then lands in one
transaction: idempotency guards, executions and tags. Lanes and routes that are
new are registered before that, in a transaction of their own: callers that submit in
a transaction that stays open must not delay everyone else who uses them. Only
where writers take turns anyway are they registered inside.

Most requests ask for something new: those take one statement, `create_new.sql`, which
writes nothing where a route, a lane, a key or an id is in the way.

A new key or id belongs to the transaction that inserts it first, which is known
when that one ends. Others wait for it, within limits.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core import creation
from flowfabric.core.bounds import BATCH_MAX, KEY_WAIT_MS
from flowfabric.core.checks import and_more, check_int, check_json, check_list
from flowfabric.core.decisions import Changes
from flowfabric.core.events import tag_events, tag_rows
from flowfabric.core.ids import (
    ExecutionId,
    Namespace,
    new_execution_ids,
    parse_execution_id,
    uuid_of,
)
from flowfabric.core.parking import new_waiter
from flowfabric.core.records import Execution, IdempotencyGuard, Lane
from flowfabric.core.results import Created, CreateResult, Duplicate
from flowfabric.core.states import TERMINAL_STATES, LaneState, PublicState
from flowfabric.engine import routes, shell, topics
from flowfabric.store.base import Key, Parameter, Reader, Transaction, UniqueViolation, drive
from flowfabric.store.caller_connections import OnConnection
from flowfabric.store.mapping import values_of

GUARD_TRIES_MAX = 5
"""How often a key that vanishes while it is looked at is tried."""
KEYS_SHOWN_MAX = 3
ACCEPTING = (LaneState.ACTIVE, LaneState.PAUSED)
TERMS_MAX = 10
"""How many different terms the requests of one statement may have: each is known by a digit."""
LOCK_WAIT_MS = 200
"""How long that statement waits for another transaction that decides the same key or id."""


# Requests whose ids and keys are all new, as rows of one statement -----------


class MadeRow(Struct, frozen=True):
    """The row that `create_new` answers with."""

    made: bool
    now_ms: int | None


class FreshRows(Struct, frozen=True):
    """Requests as `create_new.sql` takes them, all of whose ids and keys are new.

    What they share travels once, as a JSON document.
    """

    parameters: dict[str, Parameter]
    topics: set[str]
    """Topics to hint after the insert."""

    @classmethod
    def of(
        cls, checked: Sequence[creation.Checked], route_ids: Mapping[routes.Route, int]
    ) -> Self | None:
        """None unless it can take all of them."""
        terms = {id(each.terms): each.terms for each in checked}
        if len(terms) > TERMS_MAX or not all(
            routes.route_of(each) in route_ids for each in terms.values()
        ):
            return None
        keys = _column([each.idempotency_key for each in checked])
        parents = _column([each.parent_execution_id for each in checked])
        chosen = [each.execution_id for each in checked if not each.id_is_new]
        keyed = [_key_of(each) for each in checked if each.idempotency_key] if keys else []
        if len(set(chosen)) < len(chosen) or len(set(keyed)) < len(keyed):
            return None
        places = {key: str(place) for place, key in enumerate(terms)}
        parameters: dict[str, Parameter] = {
            "terms": msgspec.json.encode(
                [
                    _shared(place, each, route_ids[routes.route_of(each)])
                    for place, each in enumerate(terms.values())
                ]
            ).decode(),
            "places": "".join([places[id(each.terms)] for each in checked]).encode(),
            "ids_are_new": not chosen,
            "has_keys": bool(keys),
            "has_parents": bool(parents),
            "lock_wait_ms": LOCK_WAIT_MS if chosen or keys else None,
            "execution_ids": [each.execution_id for each in checked],
            "payloads": [each.payload for each in checked],
            "own_ids": _column([each.own_id for each in checked]),
            "idempotency_keys": keys,
            "fingerprints": [each.fingerprint for each in checked] if keys else [],
            "parents": parents,
        }
        woken = set[str]().union(*(_topics(each) for each in terms.values()))
        return cls(parameters, woken)


def _column(values: Sequence[str | None]) -> Sequence[str | None]:
    """The values, or an empty list if all are None, which costs nothing to send."""
    return () if values.count(None) == len(values) else values


def _shared(place: int, terms: creation.Terms, route_id: int) -> dict[str, object]:
    return {
        "place": place,
        "route_id": route_id,
        "instance_tag": terms.instance_tag,
        "tag_rows": tag_rows(terms.tags),
        **structs.asdict(terms),
    }


def _topics(terms: creation.Terms) -> set[str]:
    """Topics to hint for executions with these terms, whatever the time is in the database."""
    spans = [each for each in (terms.delay_ms, terms.deadline_after_ms) if each is not None]
    if (terms.delay_until_ms, terms.deadline_at_ms) != (None, None):
        # It may have come already.
        spans.append(0)
    woken = topics.topics_after(due_in_ms=min(spans, default=None))
    if woken or (terms.delay_until_ms is None and not terms.delay_ms):
        woken |= topics.topics_after(lanes=[terms.lane_id])
    return woken | {topics.EVENT_TOPIC} if terms.tags else woken


def _all_created(checked: Sequence[creation.Checked], now_ms: int) -> list[CreateResult]:
    states = {
        id(each.terms): PublicState.WAITING
        if each.terms.waits_until_ms(now_ms) is None
        else PublicState.DELAYED
        for each in checked
    }
    return [
        Created(execution_id=each.execution_id, public_state=states[id(each.terms)])
        for each in checked
    ]


# All others, in a transaction ------------------------------------------------


@contextmanager
def saying_who_decides(checked: Sequence[creation.Checked]) -> Iterator[None]:
    """Turn a lock timeout into an error that names the keys it waited for."""
    try:
        yield
    except errors.LockTimeout as error:
        keys = [repr(each.idempotency_key or each.own_id or each.execution_id) for each in checked]
        shown = and_more(keys[:KEYS_SHOWN_MAX], len(keys))
        raise errors.KeyUndecided(
            f"another open transaction is deciding the same idempotency key or id ({shown});"
            " it has to commit or roll back before this can be answered"
        ) from error


class RouteForgotten(Exception):
    """The database has forgotten a route that this process knew. Never reaches users."""

    def __init__(self, checked: Sequence[creation.Checked]) -> None:
        super().__init__("a route has yet to be registered")
        self.checked = checked


class CreateBody:
    """One creating transaction.

    `shape` may change each new execution before it is written. Unless it `registers` routes
    that are missing, it raises `RouteForgotten` before anything is written. `plain` gives the
    payload of a request from the one that is stored.
    """

    def __init__(
        self,
        checked: Sequence[creation.Checked],
        known_routes: dict[routes.Route, int],
        shape: Callable[[Execution], Execution] | None = None,
        *,
        registers: bool = True,
        plain: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.checked = checked
        self.known_routes = known_routes
        self.shape = shape
        self.registers = registers
        self.plain = plain
        self.interned: dict[routes.Route, int] = {}
        """Routes registered here, which exist if this commits."""
        self.route_ids: dict[routes.Route, int] = {}
        """All that are used here."""
        self.guards: dict[Key, IdempotencyGuard] = {}
        """Guards written here."""

    async def run(self, tx: Transaction) -> list[CreateResult]:
        await self._admit(tx)
        taken = await self._take_guards(tx)
        now_ms = await tx.now_ms()
        fresh = self._fresh(taken)
        executions = {
            execution.execution_id: execution
            for execution in self._new([fresh[each] for each in sorted(fresh)], now_ms)
        }
        inserted = await tx.insert_new(list(executions.values()))
        created = {
            execution_id: execution
            for execution_id, execution in executions.items()
            if (execution.partition_key, execution_id) in inserted
        }
        await self._check_parents(tx, [fresh[execution_id] for execution_id in created])
        await self._check_repeats(tx, taken, created)
        await self._hold_found(tx, taken, created)
        await self._finish(tx, fresh, created, now_ms)
        return self._answers(taken, created)

    def _fresh(self, taken: dict[int, ExecutionId]) -> dict[ExecutionId, creation.Checked]:
        """The requests that may create their execution: the first of each id."""
        fresh: dict[ExecutionId, creation.Checked] = {}
        for place, checked in enumerate(self.checked):
            if place not in taken:
                fresh.setdefault(checked.execution_id, checked)
        return fresh

    async def _check_parents(self, tx: Transaction, new: Sequence[creation.Checked]) -> None:
        children = [each for each in new if each.parent_execution_id is not None]
        parents = {each.parent_execution_id for each in children if each.parent_execution_id}
        namespaces = await namespaces_of(tx, sorted(parents))
        for checked in children:
            creation.check_parent(checked, namespaces)

    async def _check_repeats(
        self, tx: Transaction, taken: dict[int, ExecutionId], created: dict[ExecutionId, Execution]
    ) -> None:
        """Refuse ids that others have, here or in another namespace, unless they are repeated."""
        deciding = [each for place, each in enumerate(self.checked) if place not in taken]
        repeats = [each for each in deciding if each.execution_id not in created]
        if len(repeats) + len(created) < len(deciding):
            # One batch has an id several times.
            repeats = deciding
        namespaces = await namespaces_of(tx, sorted({each.execution_id for each in repeats}))
        for checked in repeats:
            # If retention has deleted it meanwhile, answer as before.
            creation.check_repeat(
                checked, namespaces.get(checked.execution_id, checked.terms.namespace)
            )
        compared = [
            each for each in repeats if each.strict or each.idempotency_key or each.id_is_chosen
        ]
        keys = sorted({shell.execution_key(each.execution_id) for each in compared})
        known = await tx.get(Execution, keys) if keys else {}
        for checked in compared:
            existing = known.get(shell.execution_key(checked.execution_id))
            if existing is None:
                continue
            creation.check_id_agrees(checked, existing)
            creation.check_same_task(checked, existing)
            if checked.strict:
                creation.check_strict(checked, existing, self.plain)

    async def _hold_found(
        self, tx: Transaction, taken: dict[int, ExecutionId], created: dict[ExecutionId, Execution]
    ) -> None:
        """Retain executions that a handler found (rather than created) while the handler runs."""
        pairs = {
            (taken.get(place, checked.execution_id), checked.parent_execution_id)
            for place, checked in enumerate(self.checked)
            if checked.parent_execution_id is not None
        }
        wanted = sorted(
            (child, parent) for child, parent in pairs if child not in {parent, *created}
        )
        if not wanted:
            return
        keys = sorted({shell.execution_key(each) for pair in wanted for each in pair})
        known = (await tx.get(Execution, keys)).values()
        going_on = {e.execution_id for e in known if e.public_state not in TERMINAL_STATES}
        # Retention skips one that is locked. One that goes on is not about to be deleted, and
        # may be locked for long.
        ended = sorted({shell.execution_key(child) for child, _ in wanted if child not in going_on})
        there = going_on | {
            each.execution_id for each in (await tx.lock(Execution, ended)).values()
        }
        await tx.insert_new(
            [
                new_waiter(child, parent)
                for child, parent in wanted
                if child in there and parent in going_on
            ]
        )

    async def _admit(self, tx: Transaction) -> None:
        """Hold the routes, registering missing ones; refuse lanes that take no more work."""
        wanted = routes.routes_of(self.checked)
        known = {route: self.known_routes[route] for route in wanted & self.known_routes.keys()}
        held = await routes.hold_routes(tx, known)
        for route in known.keys() - held.keys():
            self.known_routes.pop(route, None)
        self.route_ids = {route: known[route] for route in held}
        lanes = {route.lane_id: state for route, state in held.items()}
        registration = routes.Registration(self.checked, held)
        if registration.unknown and not self.registers:
            raise RouteForgotten(self.checked)
        if registration.unknown:
            # They may be rolled back, so the cache must not learn of them.
            self.interned = await registration.run(tx)
            self.route_ids |= self.interned
            lane_ids = sorted({route.lane_id for route in registration.unknown})
            found = await tx.get(Lane, [(lane_id,) for lane_id in lane_ids])
            lanes |= {each.lane_id: each.state for each in found.values()}
        closed = {lane_id: state for lane_id, state in lanes.items() if state not in ACCEPTING}
        if closed:
            await self._refuse_new(tx, closed)

    async def _refuse_new(self, tx: Transaction, closed: dict[str, LaneState]) -> None:
        """Refuse what is new in closed lanes. A repeat is answered wherever it is sent."""
        refusable = [checked for checked in self.checked if checked.terms.lane_id in closed]
        keys = [_key_of(each) for each in refusable if each.idempotency_key]
        now_ms = await tx.now_ms()
        guards = await tx.get(IdempotencyGuard, sorted(keys))
        held = {key for key, guard in guards.items() if guard.holds(now_ms)}
        known = await tx.get(
            Execution, [shell.execution_key(each.execution_id) for each in refusable]
        )
        for checked in refusable:
            repeats = shell.execution_key(checked.execution_id) in known
            if not repeats and (not checked.idempotency_key or _key_of(checked) not in held):
                lane_id = checked.terms.lane_id
                raise errors.LaneNotAccepting(
                    f"lane {lane_id!r} is {closed[lane_id]} and takes no new executions;"
                    " resume it or submit to another lane"
                )

    def _new(self, fresh: Sequence[creation.Checked], now_ms: int) -> Iterator[Execution]:
        """The execution of each request. Requests with the same terms share most fields."""
        alike: dict[int, Execution] = {}
        for checked in fresh:
            known = alike.get(id(checked.terms))
            if known is None:
                route_id = self.route_ids[routes.route_of(checked.terms)]
                known = alike[id(checked.terms)] = creation.new_execution(checked, route_id, now_ms)
            execution = creation.like_new(known, checked)
            yield execution if self.shape is None else self.shape(execution)

    async def _take_guards(self, tx: Transaction) -> dict[int, ExecutionId]:
        """Claim the idempotency keys; map places of requests that lost to what won."""
        keyed = {
            place: checked
            for place, checked in enumerate(self.checked)
            if checked.idempotency_key is not None
        }
        if not keyed:
            return {}
        now_ms = await tx.now_ms()
        guards: dict[Key, IdempotencyGuard] = {}
        for checked in keyed.values():
            guard = creation.new_guard(checked, now_ms)
            guards.setdefault((guard.namespace, guard.idempotency_key), guard)
        held = await _insert_or_lock(tx, guards)
        live = {key: guard for key, guard in held.items() if guard.holds(now_ms)}
        expired = held.keys() - live.keys()
        await tx.save(Changes(updates=tuple(guards[key] for key in sorted(expired))))
        self.guards = {key: guard for key, guard in guards.items() if key not in live}
        return _losers(keyed, guards | live)

    async def _finish(
        self,
        tx: Transaction,
        fresh: dict[ExecutionId, creation.Checked],
        created: dict[ExecutionId, Execution],
        now_ms: int,
    ) -> None:
        tagged = [
            (execution, fresh[execution_id].terms.tags)
            for execution_id, execution in created.items()
            if fresh[execution_id].terms.tags
        ]
        tags = tuple(tag for each in tagged for tag in creation.new_tags(*each))
        events = tuple(event for each in tagged for event in tag_events(*each, now_ms))
        own = {(each.namespace, each.idempotency_key) for each in created.values()}
        # A guard is deleted with its execution, so the execution has to know its key: a second key
        # for an execution that exists already is not kept.
        strays = tuple(guard for key, guard in sorted(self.guards.items()) if key not in own)
        await tx.save(Changes(inserts=tags, deletes=strays, events=events))
        topics.hint_about(tx, Changes(inserts=tuple(created.values()), events=events), now_ms)

    def _answers(
        self, taken: dict[int, ExecutionId], created: dict[ExecutionId, Execution]
    ) -> list[CreateResult]:
        answers: list[CreateResult] = []
        for place, checked in enumerate(self.checked):
            execution = None if place in taken else created.pop(checked.execution_id, None)
            if execution is None:
                winner = taken.get(place, checked.execution_id)
                answers.append(Duplicate(execution_id=winner))
            else:
                answers.append(
                    Created(execution_id=checked.execution_id, public_state=execution.public_state)
                )
        return answers


async def namespaces_of(
    reader: Reader, execution_ids: Sequence[ExecutionId]
) -> dict[ExecutionId, Namespace]:
    """The namespaces of those that exist."""
    if not execution_ids:
        return {}
    rows = await reader.select_as(NamespaceRow, "namespaces_of", **shell.id_columns(execution_ids))
    return {row.execution_id: row.namespace for row in rows}


class NamespaceRow(Struct, frozen=True):
    execution_id: ExecutionId
    namespace: Namespace


async def _insert_or_lock(
    tx: Transaction, guards: dict[Key, IdempotencyGuard]
) -> dict[Key, IdempotencyGuard]:
    """Insert guards whose key is free; lock and return those that others have set.

    Retention may delete a guard after it stood in the way and before it is locked.
    Its key is free then, and is tried again.
    """
    held: dict[Key, IdempotencyGuard] = {}
    left = set(guards)
    for _ in range(GUARD_TRIES_MAX):
        left -= await tx.insert_new([guards[key] for key in sorted(left)])
        held |= await tx.lock(IdempotencyGuard, sorted(left))
        left -= held.keys()
        if not left:
            return held
    raise errors.RetryExhausted(
        f"idempotency keys were set and deleted {GUARD_TRIES_MAX} times over"
    )


def _key_of(checked: creation.Checked) -> Key:
    """What its guard is found by."""
    assert checked.idempotency_key is not None
    return (checked.terms.namespace, checked.idempotency_key)


def _losers(
    keyed: dict[int, creation.Checked], winners: dict[Key, IdempotencyGuard]
) -> dict[int, ExecutionId]:
    losers: dict[int, ExecutionId] = {}
    for place, checked in keyed.items():
        winner = winners[_key_of(checked)]
        creation.check_key_agrees(checked, winner.execution)
        if checked.strict and winner.fingerprint != checked.fingerprint:
            raise errors.IdempotencyConflict(
                f"idempotency key {checked.idempotency_key!r} already created"
                f" {winner.execution} with another lane, kind or payload"
            )
        if winner.execution != checked.execution_id:
            losers[place] = parse_execution_id(winner.execution)
    return losers


class Creation(shell.Group):
    # Requests for executions: checked before anything is written, and as rows of a statement

    def check_request(
        self, request: object, terms: creation.Terms | None = None
    ) -> creation.Checked:
        """Check a request; `terms` are those that have been checked for it before."""
        return self._check(request, terms, *self._new_ids(1))

    def check_requests(self, requests: Sequence[object]) -> list[creation.Checked]:
        """Check each. What requests in a row share is checked once."""
        check_list("requests", requests, 0, BATCH_MAX)
        checked: list[creation.Checked] = []
        before: object = None
        for request, made in zip(requests, self._new_ids(len(requests)), strict=True):
            terms = checked[-1].terms if creation.shares_terms(request, before) else None
            checked.append(self._check(request, terms, made))
            before = request
        return checked

    def _check(
        self, request: object, terms: creation.Terms | None, made: ExecutionId
    ) -> creation.Checked:
        if not isinstance(request, creation.NewExecution):
            raise errors.InvalidInput("request", "must be a NewExecution", request)
        shared = self.check_terms(request) if terms is None else terms
        return creation.check_new(
            request,
            shared,
            self.check_payload(request.input_payload, shared.payload_encoding),
            plain_payload=self.shell.values.show(request.input_payload),
            new_uuid=uuid_of(made),
            partitions=self.shell.deployment.partitions,
        )

    def check_terms(self, request: creation.NewExecution) -> creation.Terms:
        return creation.check_terms(request, self.shell.config.kept)

    def check_payloads(
        self, payloads: Sequence[tuple[creation.Terms, bytes]]
    ) -> list[creation.Checked]:
        """Requests that name neither id nor key."""
        return [
            creation.Checked(
                terms=terms,
                execution_id=made,
                id_is_new=True,
                payload=self.check_payload(payload, terms.payload_encoding),
            )
            for (terms, payload), made in zip(payloads, self._new_ids(len(payloads)), strict=True)
        ]

    def _new_ids(self, count: int) -> list[ExecutionId]:
        first = self.shell.stamps.take(time.time_ns(), count)
        return new_execution_ids(first, os.urandom(8 * count), self.shell.deployment.partitions)

    def check_payload(self, payload: object, encoding: str | None) -> bytes:
        """A payload as it is stored."""
        values = self.shell.values
        if values.coded:
            # How deep a value is nested shows only before the codec.
            plain = check_json("input_payload", payload, values.plain_bytes_max, encoding=encoding)
            payload = values.pack(plain)
        limit = self.shell.config.payload_bytes_max
        return check_json("input_payload", payload, limit, encoding=encoding)

    async def create_execution(self, request: creation.NewExecution) -> CreateResult:
        """Create one execution, or find the one the id or idempotency key already names."""
        (result,) = await self.create_executions([request])
        return result

    async def create_executions(
        self, requests: Sequence[creation.NewExecution], *, key_wait_ms: int = KEY_WAIT_MS
    ) -> list[CreateResult]:
        """Create many in one transaction; answers in the order of the requests.

        One bad request refuses the whole batch and nothing is written. `key_wait_ms` is how
        long it waits for another transaction that is deciding one of their keys.
        """
        checked = self.check_requests(requests)
        check_int("key_wait_ms", key_wait_ms, 0, KEY_WAIT_MS)
        return await self.create_checked(checked, key_wait_ms=key_wait_ms)

    async def create_checked(
        self, checked: Sequence[creation.Checked], *, key_wait_ms: int = KEY_WAIT_MS
    ) -> list[CreateResult]:
        """Like `create_executions`, for requests already checked by `check_request`.

        Raises `KeyUndecided` when another transaction has been deciding one of their keys or
        ids for `key_wait_ms`.
        """
        if not checked:
            return []
        await self.shell.know_routes(checked)
        new = FreshRows.of(checked, self.shell.routes) if self.shell.commits else None
        if new is None:
            return await self._create(checked, key_wait_ms)
        try:
            rows = await self.store.execute_alone("create_new", new.topics, **new.parameters)
        except (UniqueViolation, errors.LockTimeout):
            # Another transaction has taken a key or an id, or is about to.
            return await self._create(checked, key_wait_ms)
        except errors.Transport as lost:
            if lost.kind is not errors.BackendErrorKind.TRANSPORT or new.parameters["lock_wait_ms"]:
                raise
            return await self._create_again(checked, lost)
        (answer,) = values_of(MadeRow, rows)
        if not answer.made or answer.now_ms is None:
            return await self._create(checked, key_wait_ms)
        return _all_created(checked, answer.now_ms)

    async def _create(
        self,
        checked: Sequence[creation.Checked],
        key_wait_ms: int | None,
        *,
        joined: OnConnection | None = None,
        registers: bool = True,
    ) -> list[CreateResult]:
        body = CreateBody(
            checked, self.shell.routes, registers=registers, plain=self.shell.values.unpack
        )
        with saying_who_decides(checked):
            return await (joined or self.store).transact(body.run, lock_wait_ms=key_wait_ms)

    async def _create_again(
        self, checked: Sequence[creation.Checked], lost: errors.Transport
    ) -> list[CreateResult]:
        """Repeat after the connection broke: what has these ids was created before that.

        The connection may also have died while it was idle, and then nothing was created.
        """
        try:
            await self._create(checked, KEY_WAIT_MS)
        except errors.Transport as lost_again:
            raise (lost_again if lost_again.may_have_happened else lost) from None
        return _all_created(checked, time.time_ns() // 1_000_000)

    # Taking part in the caller's own database transaction -------------------
    #
    # The same units of work run over the caller's connection. Nothing is committed
    # here: what was written exists if and when the caller commits.

    async def create_executions_on(
        self, connection: object, requests: Sequence[creation.NewExecution]
    ) -> list[CreateResult]:
        """Create executions inside the transaction of `connection`.

        An asyncpg or psycopg connection, a SQLAlchemy connection or session (sync or
        async) on Postgres; a `sqlite3.Connection` to the same file on SQLite.
        """
        return await self.create_checked_on(connection, self.check_requests(requests))

    async def create_checked_on(
        self, connection: object, checked: Sequence[creation.Checked]
    ) -> list[CreateResult]:
        """Like `create_executions_on`, for requests already checked by `check_request`."""
        return await self._create_on(OnConnection(self.store, connection, sync=False), checked)

    def create_executions_on_sync(
        self, connection: object, requests: Sequence[creation.NewExecution]
    ) -> list[CreateResult]:
        """The same for a connection that is not async, on the calling thread."""
        return self.create_checked_on_sync(connection, self.check_requests(requests))

    def create_checked_on_sync(
        self, connection: object, checked: Sequence[creation.Checked]
    ) -> list[CreateResult]:
        return drive(self._create_on(OnConnection(self.store, connection, sync=True), checked))

    async def _create_on(
        self, joined: OnConnection, checked: Sequence[creation.Checked]
    ) -> list[CreateResult]:
        check_list("requests", checked, 0, BATCH_MAX)
        self.shell.forget_routes()
        patience_ms = _patience(checked)
        if self.store.writes_beside:
            await self.shell.know_routes(checked, apart=joined.sync)
            try:
                return await self._create(checked, patience_ms, joined=joined, registers=False)
            except RouteForgotten:
                await self.shell.know_routes(checked, apart=joined.sync)
        return await self._create(checked, patience_ms, joined=joined)


def _patience(checked: Sequence[creation.Checked]) -> int | None:
    """How long to wait for others that submit the same key or id; None if there can be none."""
    return KEY_WAIT_MS if any(each.idempotency_key or each.own_id for each in checked) else None
