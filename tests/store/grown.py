"""A database that has been in use: a hundred thousand executions in every situation.

The same rows for both dialects. Times are counted from `START_MS`; at `NOW_MS` five
hundred rows of each kind are due. At the head of the lane `main` stand crowds that the
worker in question cannot serve: work that needs `gpu`, and work of the kind `video`. In the lane
`limited` one tenant has a crowd behind a limit that is full, and another one has a little.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from flowfabric import Engine
from flowfabric.core.bounds import HELD_MS_MAX, HELD_MS_MIN, TIME_MS_MAX
from flowfabric.core.creation import NewExecution
from flowfabric.core.gates import GateName, GateOwner
from flowfabric.core.ids import FIRST_UUID, SignalId, WaitpointKey, make_execution_id, uuid_of
from flowfabric.core.limits import policy_id_of
from flowfabric.core.results import Created
from flowfabric.core.signals import SignalRequest, sure_signal
from flowfabric.core.states import PublicState
from flowfabric.store.base import Parameter
from flowfabric.store.postgres.transaction import STATEMENTS
from flowfabric.store.statements import numbered

START_MS = 1_700_000_000_000
NOW_MS = START_MS + 500_500
EACH = 20_000
LOST = 5_000
READY = 1_000
EVENTS = 100_000
GUARDS = 20_000
PAGE = 50
WHOLE = 3
"""In how many tables a whole execution is looked up."""
PARTITION = 86
"""Where all of them are."""
BATCH = 100
FENCES = 10
LEASED_SALT, ENDED_SALT, LOST_SALT, DELAYED_SALT = 0x1EA5, 0xE4D, 0x1057, 0xDE1

LEASED = {
    "lifecycle_phase": "'active'",
    "ownership_state": "'leased'",
    "eligibility_state": "'not_applicable'",
    "blocking_reason": "'none'",
    "attempt_state": "'running_attempt'",
    "public_state": "'active'",
    "ready": "false",
    "lease_epoch": "1",
    "total_attempt_count": "1",
    "worker_id": "'ann'",
    "worker_instance_id": "'ann-1'",
    "lease_acquired_at_ms": "t.created_at_ms",
    "lease_expires_at_ms": "t.created_at_ms + n * 1000",
    "attempt_deadline_ms": "t.created_at_ms + n * 1000",
}
DELAYED = {
    "eligibility_state": "'not_eligible_until_time'",
    "blocking_reason": "'waiting_for_delay'",
    "public_state": "'delayed'",
    "ready": "false",
    "delay_until_ms": "t.created_at_ms + n * 1000",
    "deadline_at_ms": "t.created_at_ms + n * 1000",
    "created_at_ms": "t.created_at_ms + n",
}
ENDED = {
    "lifecycle_phase": "'terminal'",
    "eligibility_state": "'not_applicable'",
    "blocking_reason": "'none'",
    "terminal_outcome": "'success'",
    "attempt_state": "'attempt_terminal'",
    "public_state": "'completed'",
    "ready": "false",
    "total_attempt_count": "1",
    "completed_at_ms": "t.created_at_ms + n",
    "retain_until_ms": "t.created_at_ms + n * 1000",
    "created_at_ms": "t.created_at_ms + n",
}
LOST_LEASES = LEASED | {
    "ownership_state": "'lease_expired_reclaimable'",
    "blocking_reason": "'waiting_for_worker'",
    "attempt_state": "'attempt_interrupted'",
    "ready": "true",
    "lease_expires_at_ms": "t.created_at_ms - n",
    "lease_expired_at_ms": "t.created_at_ms",
    "attempt_deadline_ms": "null",
}
WAITING = {"created_at_ms": "t.created_at_ms + n"}
FIRST = WAITING | {"priority": "9000"}
HELD = LEASED | {"lease_expires_at_ms": "t.created_at_ms + 10000000", "attempt_deadline_ms": "null"}
LIMIT = "per-tenant"
TIMEOUT_MS = 60_000


def gate(tenant: str) -> GateName:
    return GateName(GateOwner.QUOTA, policy_id_of("default", LIMIT), tenant)


@dataclass(frozen=True, eq=False)
class Group:
    """Copies of one execution."""

    salt: int
    count: int
    kind: str
    changes: Mapping[str, str]
    lane: str = "main"
    needs: tuple[str, ...] = ()
    namespace: str = "default"
    tenant: str = ""
    """Under a limit of one at a time for each."""

    async def template(self, engine: Engine) -> str:
        """The uuid of an execution like those of the group."""
        if self.tenant:
            await engine.set_limit(LIMIT, active_concurrency_cap=1)
        created = await engine.create_execution(
            NewExecution(
                execution_kind=self.kind,
                execution_id=make_execution_id(PARTITION, f"{self.salt:08x}{FIRST_UUID[8:]}"),
                lane_id=self.lane,
                namespace=self.namespace,
                policy={
                    "routing_requirements": {"required_capabilities": list(self.needs)},
                    "timeout_policy": {"attempt_timeout_ms": TIMEOUT_MS},
                },
                gates=[gate(self.tenant)] if self.tenant else [],
            )
        )
        assert isinstance(created, Created)
        return uuid_of(created.execution_id)


def groups(crowd: int) -> Iterator[Group]:
    yield Group(LEASED_SALT, EACH, "mail", LEASED)
    yield Group(ENDED_SALT, EACH, "mail", ENDED, namespace="archive")
    yield Group(LOST_SALT, LOST, "lost", LOST_LEASES)
    yield Group(DELAYED_SALT, EACH, "mail", DELAYED)
    yield Group(0xA, READY, "mail", WAITING)
    yield Group(0xB, READY, "mail", WAITING, lane="quiet")
    yield Group(0xC1, crowd, "mail", FIRST, needs=("gpu",))
    yield Group(0xC2, crowd, "video", FIRST)
    yield Group(0xD1, crowd, "sync", FIRST, lane="limited", tenant="large")
    yield Group(0xD2, 1, "sync", HELD, lane="limited", tenant="large")
    yield Group(0xD3, READY, "sync", WAITING, lane="limited", tenant="small")


def id_of(salt: int, n: int) -> tuple[int, str]:
    """Partition and uuid of a copy; see `tests.bulk`."""
    uuid = f"{salt:08x}-0000-4000-8000-{n:012x}"
    return PARTITION, uuid


PAUSED = id_of(DELAYED_SALT, 7)
"""It has a suspension."""
FRAMES = 5_000
LONG_STREAM = id_of(LEASED_SALT, 7)
"""Of what runs. Most streams have two frames, this one has many."""

BELONGINGS = (
    """
    insert into attempt (partition_key, execution_id, attempt_index, attempt_id, attempt_type,
                         attempt_state, created_at_ms, lease_epoch)
    select partition_key, execution_id, 0, execution_id, 'initial', 'started', 1, 1
      from execution_now where total_attempt_count = 1
    """,
    """
    update live set lease_id = execution_id, current_attempt_id = execution_id
     where public_state = 'active'
    """,
    """
    insert into execution_tag (partition_key, execution_id, tag_key, tag_value, created_at_ms)
    select partition_key, execution_id, 'app.tenant', 'acme', created_at_ms
      from execution_now where public_state in ('delayed', 'completed')
    """,
    """
    update ending set awaited = true where public_state = 'completed' and created_at_ms % 8 = 0
    """,
    """
    insert into waiter (partition_key, execution_id, waiting)
    select partition_key, execution_id, '{fp:' || partition_key || '}:' || execution_id
      from execution_now where public_state = 'active'
    """,
    """
    insert into suspension (partition_key, execution_id, suspension_id, waitpoint_id, created_at_ms,
                            attempt_index, reason_code, requested_by, resume_condition,
                            resume_policy, timeout_at_ms)
    select partition_key, execution_id, execution_id, execution_id, created_at_ms, 0,
           'waiting_for_signal', 'worker', '"OperatorOnly"', '{}',
           coalesce(delay_until_ms, created_at_ms + 600000)
      from execution_now where public_state in ('delayed', 'waiting')
    """,
    """
    insert into waitpoint (partition_key, execution_id, waitpoint_id, suspension_id, created_at_ms,
                           attempt_index, ordinal, signal_count, matched_signal_count,
                           own_name_only, ended_with_execution, state, waitpoint_key, token_kid,
                           token_fingerprint, required_signal_names, expires_at_ms)
    select partition_key, execution_id, suspension_id, suspension_id, created_at_ms, 0, 0, 0, 0,
           false, false, 'pending', 'gate', 'k1', '', '[]', timeout_at_ms
      from suspension
    """,
    f"""
    insert into stream (partition_key, execution_id, attempt_index, attempt_id, created_at_ms,
                        frame_count, total_bytes, last_frame_id, last_frame_at_ms, kept_after,
                        deleted_through, retention_maxlen, has_durable_frame, forgotten,
                        expires_at_ms)
    select partition_key, execution_id, 0, attempt_id, created_at_ms, 2, 2, 2, 2, 0, 0, 10000,
           false, false, created_at_ms
      from attempt
     where execution_id >= '{LEASED_SALT:08x}-0000-4000-8000-000000000000'
    """,
    f"""
    insert into frame (partition_key, execution_id, attempt_index, frame_id, frame_number,
                       frame_type, mode, encoding, source, coded, payload)
    select s.partition_key, s.execution_id, 0, n, n, 'event', 'durable', 'utf8', 'worker', false,
           substr(d.handle_key, 1, 1)
      from stream s
     cross join deployment d
     cross join (with recursive numbers (n) as (
            select 1 union all select n + 1 from numbers where n < {FRAMES})
        select n from numbers) as counted
     where n <= 2 or s.execution_id = '{LONG_STREAM[1]}'
    """,
)
"""What else the executions have; the same words in both dialects."""


Parameters = dict[str, Parameter]
NEXT_DUE = numbered("next_due", STATEMENTS)
READING = ("audit_", "due_", "next_", "list_", "tags_", "read_", "event_", "count_")


@dataclass(frozen=True)
class Question:
    """A statement with parameters, how many rows it may look at and how many it returns."""

    statement: str
    parameters: Parameters
    rows: int
    returns: int
    label: str = ""

    @property
    def writes(self) -> bool:
        return not self.statement.startswith(READING)

    def __str__(self) -> str:
        return f"{self.statement} {self.label}".strip()


def claim(lane: str, limit: int, kind: str = "mail") -> Question:
    """What a worker asks that has no `gpu` and serves one kind."""
    parameters: Parameters = {
        "namespace": "default",
        "lanes": [lane],
        "kinds": [kind],
        "capabilities": [],
        "worker_id": "bob",
        "worker_instance_id": "bob-1",
        "lease_ttl_ms": 1_000,
        "limit": limit,
        "uuids": bytes(range(16)) * limit,
        "renews_first": True,
        "clock": NOW_MS,
    }
    return Question("claim_free", parameters, limit, limit, f"{limit} {kind} from {lane}")


def creation() -> Question:
    """Of executions with keys, ids and parents, where all is new."""
    term = {
        "place": 0,
        "route_id": CROWDED_ROUTE,
        "namespace": "default",
        "lane_id": "main",
        "execution_kind": "video",
        "required_capabilities": [],
        "gate_ids": "[]",
        "priority": 0,
        "creator_identity": "",
        "policy": "{}",
        "retention_ms": 1,
        "retention_failed_ms": 1,
        "delay_ms": 1_000,
        "tag_rows": [["app.tenant", "acme", "attached", "{}"]],
    }
    parameters: Parameters = {
        "terms": json.dumps([term]),
        "places": b"0" * FENCES,
        "ids_are_new": False,
        "has_keys": True,
        "has_parents": True,
        "lock_wait_ms": 100,
        "execution_ids": [make_execution_id(*id_of(0xF, n)) for n in range(FENCES)],
        "payloads": [b"{}"] * FENCES,
        "own_ids": [f"own-{n}" for n in range(FENCES)],
        "idempotency_keys": [f"new-{n}" for n in range(FENCES)],
        "fingerprints": [b"f"] * FENCES,
        "parents": [make_execution_id(*id_of(LEASED_SALT, n + 1)) for n in range(FENCES)],
        "clock": NOW_MS,
    }
    # Each is looked for in three tables and written into five.
    return Question("create_new", parameters, 2 * FENCES, 1)


def fences() -> Parameters:
    keys = [id_of(LEASED_SALT, EACH - n) for n in range(FENCES)]
    uuids = [uuid for _, uuid in keys]
    return {
        "partition_keys": [partition for partition, _ in keys],
        "execution_ids": uuids,
        "lease_ids": uuids,
        "clock": NOW_MS,
    }


LIST: Parameters = {
    "namespace": None,
    "lane_id": None,
    "execution_kind": None,
    "versions_of": None,
    "created_after_ms": -1,
    "created_before_ms": TIME_MS_MAX,
    "before_ms": TIME_MS_MAX,
    "before_id": "ffffffff-ffff-ffff-ffff-ffffffffffff",
    "before_partition": 65_535,
    "limit": PAGE,
}
COMPLETED = [PublicState.COMPLETED.value]
ANY_STATE = [state.value for state in PublicState]
ROUTES = 8
CROWDED_ROUTE = 6
"""Of the kind `video`; routes are numbered in the order of `groups`."""
LARGE_ROUTE, SMALL_ROUTE = 7, 8
"""Of the tenants."""


def limited_claims() -> Iterator[Question]:
    """What a claim of limited work asks, behind a crowd that may not start and in it."""
    parameters = claim("limited", 10, "sync").parameters
    search: Parameters = {
        "namespace": "default",
        "lanes": ["limited"],
        "kinds": ["sync"],
        "capabilities": [],
        "after": 0,
        "limit": 16,
        "steps_max": 1_000,
        "clock": NOW_MS,
    }
    yield Question("find_gated_routes", search, 4, 2)
    both = [gate(tenant).gate_id for tenant in ("large", "small")]
    asked: Parameters = {"gate_ids": both, "counts_all": False, "counted_max": 1, "clock": NOW_MS}
    yield Question("count_gate_use", asked, len(both), 2)
    for route_id, starts in ((SMALL_ROUTE, 10), (LARGE_ROUTE, 10), (LARGE_ROUTE, 0)):
        allowed = json.dumps([{"route_id": route_id, "slots": 10, "starts": starts}])
        label = f"{starts} of route {route_id} under a limit"
        taking: Parameters = parameters | {"kinds": [], "allowed": allowed}
        yield Question("claim_ready", taking, 10, starts, label)


def signal() -> Parameters:
    request = SignalRequest(signal_name="go", new_id=SignalId(FIRST_UUID))
    sure = sure_signal(request, WaitpointKey("gate"))
    at: Parameters = dict(zip(("partition_key", "execution_id"), PAUSED, strict=True))
    return {**sure, **at, "conditions": ["none"], "clock": NOW_MS}


MEMBER: Parameters = {
    "lease_id": FIRST_UUID,
    "result": b"1",
    "result_encoding": "json",
    "payload_bytes_max": 1_000,
    "clock": NOW_MS,
}


def lists() -> Iterator[Question]:
    page = LIST | {"states": COMPLETED}
    every = LIST | {"states": ANY_STATE}
    middle = {"before_ms": START_MS + EACH // 2}
    yield Question("list_by_route", every, ROUTES * PAGE * 2, PAGE, "everything")
    yield Question("list_by_route", page | {"lane_id": "main"}, ROUTES * PAGE, PAGE, "completed")
    mail: Parameters = {"execution_kind": "mail", "versions_of": "mail@"}
    yield Question("list_by_route", every | mail, ROUTES * PAGE * 2, PAGE, "of a task")
    yield Question("list_by_route", every | middle, ROUTES * PAGE * 2, PAGE, "second page")
    archive, found = page | {"namespace": "archive"}, (1 + WHOLE) * PAGE
    yield Question("list_by_route", archive, found, PAGE, "of a namespace")
    yield Question("list_by_route", archive | middle, found, PAGE, "of a namespace, second page")
    tagged = {"tag_key": "app.tenant", "tag_value": "acme"}
    yield Question("list_by_tag", every | tagged, found, PAGE)
    yield Question("list_by_tag", every | tagged | middle, found, PAGE, "second page")
    until = {"created_before_ms": START_MS + EACH // 2}
    yield Question("list_by_tag", every | tagged | until, found, PAGE, "until a time")
    yield Question("list_by_route", archive | until, found, PAGE, "of a namespace until a time")
    yield Question(
        "list_partition",
        {
            "partition_key": id_of(0, 0)[0],
            "start": id_of(ENDED_SALT, 7)[1],
            "namespace": None,
            "limit": PAGE,
        },
        PAGE,
        PAGE,
    )
    yield Question("list_lanes", {"after": "", "limit": PAGE}, PAGE, 4)
    partition_key, uuid = id_of(LEASED_SALT, 1)
    one: Parameters = {"partition_key": partition_key, "execution_id": uuid}
    yield Question("list_attempts", one, 1, 1)
    partition_key, uuid = id_of(DELAYED_SALT, 1)
    waiting: Parameters = {"partition_key": partition_key, "execution_id": uuid, "limit": PAGE}
    yield Question("list_open_waitpoints", waiting | {"after": FIRST_UUID}, 1, 1)
    suspended: Parameters = {"after_ms": -1, "after_id": FIRST_UUID, "limit": PAGE}
    yield Question("list_suspended", suspended | {"partition_key": None}, PAGE, PAGE)
    later = {"partition_key": partition_key, "after_ms": START_MS + EACH // 2}
    yield Question("list_suspended", suspended | later, PAGE, PAGE, "second page")
    keys = [id_of(ENDED_SALT, n + 1) for n in range(PAGE)]
    several: Parameters = {
        "partition_keys": [key[0] for key in keys],
        "execution_ids": [key[1] for key in keys],
    }
    yield Question("tags_of_executions", several, PAGE, PAGE)
    expired: Parameters = {
        "as_of_ms": NOW_MS,
        "after_ms": -1,
        "after_partition": -1,
        "after_id": FIRST_UUID,
        "namespace": None,
        "limit": BATCH,
    }
    yield Question("list_expired_leases", expired, 2 * BATCH, BATCH)
    yield Question(
        "list_expired_leases", expired | {"after_ms": START_MS + 1}, 2 * BATCH, BATCH, "second page"
    )


def audits() -> Iterator[Question]:
    """A page each of what the audit looks at."""
    waiting: Parameters = {"after": make_execution_id(*id_of(LEASED_SALT, 7)), "limit": PAGE}
    yield Question("list_waiting", waiting, PAGE, PAGE)
    yield Question("audit_waiters", waiting, PAGE, 1)
    who = [id_of(LEASED_SALT, n + 7) for n in range(PAGE)]
    waits: Parameters = {
        "partition_keys": [key[0] for key in who],
        "execution_ids": [key[1] for key in who],
        "limit": PAGE,
    }
    yield Question("list_idle_waits", waits, PAGE, 0)
    keys: Parameters = {"after_namespace": "default", "after_key": "key-1000", "limit": PAGE}
    yield Question("list_guards", keys, PAGE, PAGE)


def questions(event_ids: int = 1) -> list[Question]:
    everybody: Parameters = {"namespace": None, "tag_key": None, "tag_value": None}
    due: Parameters = {"now_ms": NOW_MS, "limit": BATCH, **everybody}
    before: Parameters = {"before_ms": NOW_MS, "limit": BATCH}
    held: Parameters = {"held_ms_min": HELD_MS_MIN, "held_ms_max": HELD_MS_MAX}
    asked: Parameters = {
        "namespace": "default",
        "lanes": ["main"],
        "kinds": ["mail"],
        "capabilities": [],
    }
    paused: Parameters = dict(zip(("partition_key", "execution_id"), PAUSED, strict=True))
    completions: Parameters = {
        "results": [b"done"] * FENCES,
        "result_encodings": [None] * FENCES,
    }
    return [
        claim("main", 1),
        claim("main", 10),
        claim("quiet", 10),
        claim("main", 10, "lost"),
        *limited_claims(),
        Question("best_ready", asked | {"candidates": BATCH, "route_id": None}, 2 * BATCH, 1),
        Question("ready_beyond_capabilities", asked | {"limit": BATCH}, BATCH, BATCH),
        Question("kept_back_for", asked | {"capabilities": ["gpu"], "limit": BATCH}, 0, 0),
        Question("complete_leased", fences() | completions, FENCES, 1),
        Question("renew_leased", fences() | {"lease_ttls_ms": [1_000] * FENCES}, FENCES, FENCES),
        *(Question(f"due_{name}", due, BATCH, BATCH) for name in ("leases", "delays", "attempts")),
        *(
            Question(f"due_{name}", due, BATCH, BATCH)
            for name in ("deadlines", "suspensions", "waitpoints")
        ),
        Question("ended_and_awaited", {"limit": BATCH}, BATCH, BATCH),
        Question("signal_waiting", signal(), 1, 0),
        Question("complete_member", paused | MEMBER, 1, 0),
        Question("read_progress", paused, 1, 1),
        Question("read_for_completion", paused | {"limit": 9, "clock": NOW_MS}, 1, 1),
        Question(
            "blocked_by_code",
            {
                "kinds": ["mail"],
                "namespace": "default",
                "blocked_before_ms": NOW_MS,
                "limit": BATCH,
            },
            BATCH,
            0,
        ),
        Question("next_due", dict.fromkeys(NEXT_DUE.parameters, 1_000), 20, 1),
        *lists(),
        *audits(),
        Question(
            "read_events",
            {
                "after": 50 * event_ids,
                "through": 150 * event_ids,
                "category": None,
                "limit": 100,
            },
            100,
            100,
        ),
        Question("event_window", {"after": 50 * event_ids, "window": 100}, 100, 1),
        Question("trim_executions", before | held | everybody, BATCH, 1),
        Question("trim_events", before, BATCH, 1),
        Question("trim_idempotency_guards", before, BATCH, 1),
        *queue_questions(),
        *stream_questions(),
    ]


def stream_questions() -> Iterator[Question]:
    several = fences()
    del several["lease_ids"]
    yield Question("hold_for_append", several, FENCES, FENCES)
    first: Parameters = {"attempt_indexes": [0] * FENCES}
    yield Question("stream_facts", several | first, 3 * FENCES, FENCES)
    partition_key, uuid = LONG_STREAM
    middle: Parameters = {
        "partition_key": partition_key,
        "execution_id": uuid,
        "attempt_index": 0,
        "from_id": FRAMES // 2,
        "to_id": 2**63 - 1,
        "hidden_through": 100,
        "best_effort": True,
        "limit": PAGE,
    }
    yield Question("read_frames", middle, PAGE, PAGE)
    long: Parameters = {
        "partition_keys": [partition_key],
        "execution_ids": [uuid],
        "attempt_indexes": [0],
        "throughs": [BATCH],
    }
    yield Question("delete_frames", long, BATCH, 1)
    yield Question("due_streams", {"now_ms": NOW_MS, "limit": BATCH}, BATCH, BATCH)


def queue_questions() -> Iterator[Question]:
    """How many go before the first of a crowd, one of its middle, and one of lower priority."""
    places = (("first", 9_000, 1), ("middle", 9_000, READY), ("lower", 8_999, 1))
    for label, priority, n in places:
        place: Parameters = {
            "route_id": CROWDED_ROUTE,
            "priority": priority,
            "created_at_ms": START_MS + n,
            "execution_id": id_of(0xC2, n)[1],
            "limit": PAGE,
        }
        yield Question("count_ahead", place, PAGE, 1, label)
