"""A namespace with one of everything, and what it would be called if it were nowhere."""

import re
from collections.abc import Mapping

import msgspec
from msgspec import Struct, structs

from flowfabric import Engine
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from flowfabric.core.handles import Handle
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.streams import NewFrame
from flowfabric.operations import RemoteOperation, encode
from tests.conformance.given import Given

FLOW_ID = "11111111-1111-4111-8111-111111111111"
UUID = "22222222-2222-4222-8222-222222222222"
SECRET = "sesame"
"""Part of all that the shop has written down."""
NAMED = {"execution_id", "execution_ids", "handle", "handles", "flow_id", "namespace", "members"}

PLAIN: Mapping[str, object] = {
    "lane_id": "default",
    "lane_ids": ["default"],
    "worker_id": "w",
    "limit": 1,
    "liveness_ttl_ms": 10_000,
    "reason": "r",
    "detail": "d",
    "step_key": None,
    "key": "k",
    "value": "v",
    "tags": {"k": "v"},
    "names": ["lane_id"],
    "new_priority": 1,
    "phase": "active",
    "attempt_index": 0,
    "delay_until_ms": 1,
    "grant_key": "g",
    "mark": "0123456789ab",
    "edge_id": UUID,
    "policy": {"kind": "all_of"},
    "suspension_id": UUID,
    "signal_ids": [UUID],
    "waitpoint_key": "wp:x",
    "waitpoint_token": "k1:00",
    "signal_name": "s",
    "idempotency_suffix": "i",
    "resume_condition": {"type": "OperatorOnly"},
    "expires_in_ms": 1_000,
    "reservation_id": "r",
    "idempotency_key": "i",
    "usage": {"custom": {"tokens": 1}},
    "update": {},
    "amounts": {"tokens": 1},
    "used": {"tokens": 1},
    "deltas": {"tokens": 1},
    "dimensions": ["tokens"],
    "kinds": ["x"],
    "count": 1,
    "own_id": "own",
    "after": "0",
    "fence": {"lease_id": UUID, "lease_epoch": 1, "attempt_id": UUID},
    "wanted": {},
    "flow_kind": "k",
    "frame": {"frame_type": "delta", "payload": ""},
    "scopes": ["read"],
    "token_id": "0123",
    "kid": "k",
    "secret_hex": "00",
    "new_kid": "k",
    "new_secret_hex": "00",
    "data": "",
    "result": "",
    "matching": {},
    "partition": 0,
}
"""Something that decodes, for arguments that name nobody's property."""


def required(operation: RemoteOperation) -> set[str]:
    """The arguments that an operation cannot do without."""
    return {field.name for field in structs.fields(operation.arguments) if field.required}


class Names(Struct, frozen=True, kw_only=True):
    """What a namespace is called, and what it has."""

    namespace: str
    execution: str
    suspended: str
    waitpoint: str
    own: str
    flow: str
    member: str
    budget: str
    quota: str
    schedule: str
    limit: str
    worker: str
    handle: dict[str, object]

    def texts(self) -> dict[str, str]:
        """By placeholder."""
        fields = structs.asdict(self)
        return {f"{{{name}}}": each for name, each in fields.items() if isinstance(each, str)}

    def fill(self, value: object) -> object:
        """The value with names for placeholders, however deep."""
        if isinstance(value, str):
            for placeholder, text in self.texts().items():
                value = value.replace(placeholder, text)
            return value
        if isinstance(value, list):
            return [self.fill(each) for each in value]
        if isinstance(value, Mapping):
            return {key: self.fill(each) for key, each in value.items()}
        return value

    def arguments(self, operation: RemoteOperation, *, own: bool = False) -> dict[str, object]:
        """Arguments that name them, as far as the operation takes them.

        `own`: but for the namespace.
        """
        return {
            name: value
            for name in operation.names
            if name in required(operation) or (name in NAMED and not (own and name == "namespace"))
            if (value := self._value(operation.name, name, own)) is not None or name in PLAIN
        }

    def _value(self, operation: str, name: str, own: bool) -> object:
        namespace = "other" if own else self.namespace
        deep = self._structs(namespace)
        if (operation, name) in deep:
            return deep[operation, name]
        if name == "name":
            return "n" if operation == "create_token" else self.limit
        if name.endswith("execution_id"):
            return self.execution
        mine: dict[str, object] = {
            "execution_ids": [self.execution],
            "members": [self.execution],
            "handle": self.handle,
            "handles": [self.handle],
            "flow_id": self.flow,
            "namespace": self.namespace,
            "budget_id": self.budget,
            "quota_policy_id": self.quota,
            "schedule_id": self.schedule,
            "worker_instance_id": self.worker,
            "waitpoint_id": self.waitpoint,
            "text": self.execution[-36:],
        }
        return mine.get(name, PLAIN.get(name))

    def _structs(self, namespace: str) -> dict[tuple[str, str], object]:
        handle, execution_id = self.handle, self.execution
        return {
            ("create_execution", "request"): {
                "execution_kind": "x",
                "namespace": namespace,
                "execution_id": execution_id,
            },
            ("create_executions", "requests"): [
                {"execution_kind": "x", "namespace": "other", "parent_execution_id": execution_id}
            ],
            ("complete_many", "completions"): [{"handle": handle}],
            ("fail_many", "reports"): [{"handle": handle, "reason": "r"}],
            ("record_steps", "reports"): [{"handle": handle, "step": {"step_key": "s"}}],
            ("append_frames", "appends"): [{"handle": handle, "frames": []}],
            ("post_to_budgets", "requests"): [
                {
                    "type": "Usage",
                    "budget_id": self.budget,
                    "amounts": {"tokens": 1},
                    "namespace": "other",
                    "handle": handle,
                }
            ],
            ("upsert_schedule", "definition"): {
                "schedule_id": self.schedule,
                "execution_kind": "x",
                "every_ms": 1_000,
                "namespace": namespace,
            },
            ("create_budget", "definition"): {"budget_id": self.budget, "namespace": namespace},
            ("declare_limits", "limits"): [
                {"name": self.limit, "namespace": namespace, "spec": {"active_concurrency_cap": 1}}
            ],
            ("claim_from_resume_grant", "token"): {
                "grant": {
                    "type": "ResumeGrant",
                    "execution_id": execution_id,
                    "partition_key": "{fp:0}",
                    "grant_key": "g",
                    "expires_at_ms": 1,
                    "lane_id": "default",
                },
                "worker_id": "w",
                "worker_instance_id": "w-1",
            },
            ("cancel_matching", "matching"): {"namespace": namespace},
            ("replay_matching", "matching"): {"namespace": namespace},
            ("next_events", "wanted"): {"namespace": namespace},
            ("report_usage_admin", "deltas"): [1],
        }


async def open_shop(engine: Engine, given: Given) -> Names:
    """The namespace `shop`, with one of everything."""
    await engine.create_execution(
        NewExecution(
            execution_kind=SECRET,
            namespace="shop",
            input_payload=f'"{SECRET}"'.encode(),
            tags={"team": SECRET},
        )
    )
    (claimed,) = await engine.claim_many(
        ["default"], limit=1, worker_id="w", worker_instance_id="shop-worker", namespace="shop"
    )
    await engine.append_frame(claimed.handle, NewFrame(frame_type="token", payload=SECRET.encode()))
    suspended = (await given.suspended(namespace="shop")).execution_id
    (waitpoint,) = (await engine.list_pending_waitpoints(suspended)).waitpoints
    await engine.create_execution(
        NewExecution(execution_kind=SECRET, namespace="shop", execution_id="order-17")
    )
    await engine.create_flow(FLOW_ID, flow_kind=SECRET, namespace="shop")
    member = engine.new_member_id(FLOW_ID)
    new = NewExecution(execution_kind=SECRET, namespace="shop", execution_id=member)
    await engine.add_dependencies(FLOW_ID, members=[new])
    budget = "33333333-3333-4333-8333-333333333333"
    await engine.create_budget(
        BudgetDefinition(budget_id=budget, namespace="shop", hard_limits={SECRET: 5})
    )
    quota = "44444444-4444-4444-8444-444444444444"
    await engine.create_quota_policy(quota, max_concurrent=1, namespace="shop", name=SECRET)
    await engine.set_limit("provider", namespace="shop", active_concurrency_cap=7_777)
    await engine.upsert_schedule(
        ScheduleDefinition(
            schedule_id="nightly", execution_kind=SECRET, cron="0 3 * * *", namespace="shop"
        )
    )
    await engine.register_worker(
        ["default"],
        worker_id=SECRET,
        worker_instance_id="shop-worker",
        liveness_ttl_ms=60_000,
        namespace="shop",
    )
    return Names(
        namespace="shop",
        execution=claimed.execution_id,
        suspended=suspended,
        waitpoint=waitpoint.waitpoint_id,
        own="order-17",
        flow=FLOW_ID,
        member=member,
        budget=budget,
        quota=quota,
        schedule="nightly",
        limit="provider",
        worker="shop-worker",
        handle=_forged(claimed.handle),
    )


def _forged(handle: Handle) -> dict[str, object]:
    """A handle that nobody was given: those that were are proofs."""
    plain = msgspec.json.decode(encode(handle), type=dict[str, object])
    return plain | {"signature": msgspec.json.decode(encode(b"\x00" * len(handle.signature)))}


def nowhere(shop: Names) -> Names:
    """The same of a namespace that has nothing."""

    def ghost(text: str) -> str:
        return f"{text[:-12]}{'0' * 12}"

    execution = ghost(shop.execution)
    return Names(
        namespace="void",
        execution=execution,
        suspended=ghost(shop.suspended),
        waitpoint=ghost(shop.waitpoint),
        own="order-99",
        flow=ghost(shop.flow),
        member=ghost(shop.member),
        budget=ghost(shop.budget),
        quota=ghost(shop.quota),
        schedule="yearly",
        limit="nobodys",
        worker="void-worker",
        handle=shop.handle | {"execution_id": execution},
    )


_UUID = re.compile(r"(\{fp:\d+\}:)?[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def without_names(text: str, names: Names) -> str:
    """An answer without what it was asked about."""
    for placeholder, each in names.texts().items():
        text = text.replace(each, placeholder)
    return _UUID.sub("<id>", text)


def leaks(text: str, shop: Names, request: str) -> list[str]:
    """What an answer tells of the shop that its request did not."""
    known = [SECRET, "7777", *shop.texts().values()]
    return [each for each in known if each in text and each not in request]


async def state_of(engine: Engine, shop: Names) -> list[object]:
    """All that can be read of the shop."""
    return [
        await engine.inspect_execution(shop.execution),
        await engine.inspect_execution(shop.suspended),
        await engine.inspect_execution(shop.member),
        await engine.list_pending_waitpoints(shop.suspended),
        await engine.read_stream(shop.execution, 0),
        await engine.describe_flow(shop.flow),
        await engine.list_flow_members(shop.flow),
        await engine.list_budgets(namespace="shop"),
        await engine.list_limits(namespace="shop"),
        await engine.list_schedules(namespace="shop"),
        await engine.list_worker_events(namespace="shop"),
        [each.namespace for each in (await engine.list_workers(namespace="shop")).workers],
        [
            each.event_id
            for each in (await engine.read_events(limit=200)).events
            if each.namespace == "shop"
        ],
    ]
