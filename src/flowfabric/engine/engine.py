"""The engine: every operation, by its name, over any store.

`flowfabric.connect(url)` gives an open `Engine`. Its operations are those of a few groups,
by noun, in the modules beside this one; each locks, lets the core decide, and saves.
"""

import asyncio
import copy
import functools
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Self, TypeVar

from msgspec import Struct

from flowfabric.config import EngineConfig
from flowfabric.core.checks import check_int
from flowfabric.core.ids import PartitionConfig
from flowfabric.engine.api_tokens import Tokens
from flowfabric.engine.audit import Audits
from flowfabric.engine.budgets import Budgets
from flowfabric.engine.completions import Completions
from flowfabric.engine.details import Details
from flowfabric.engine.events import Subscriptions
from flowfabric.engine.executions import Executions
from flowfabric.engine.flow_audit import FlowAudits
from flowfabric.engine.flow_building import FlowBuilding
from flowfabric.engine.flow_operators import FlowOperators, FlowReplays
from flowfabric.engine.flow_reads import FlowReads
from flowfabric.engine.grants import Grants
from flowfabric.engine.keeping_back import KeepingBack
from flowfabric.engine.lanes import Lanes
from flowfabric.engine.limits import LimitOperations
from flowfabric.engine.reads import Reads
from flowfabric.engine.routes import Route
from flowfabric.engine.schedules import Schedules
from flowfabric.engine.shell import Deployment, Shell
from flowfabric.engine.signals import SignalOperations
from flowfabric.engine.streams import Streams
from flowfabric.engine.suspensions import Suspensions
from flowfabric.engine.tails import Tails
from flowfabric.engine.values import Values
from flowfabric.engine.waitpoint_keys import WaitpointKeys
from flowfabric.engine.workers import Workers
from flowfabric.errors import OperationTimeout
from flowfabric.store.base import Reader, Store
from flowfabric.version import __version__

G = TypeVar("G")
P = ParamSpec("P")
T = TypeVar("T")

SHUTDOWN_GRACE_MS = 10_000


class Prepared(Struct, frozen=True, kw_only=True):
    """What `prepare` did; empty when there was nothing to do."""

    applied: tuple[str, ...]


class Identity(Struct, frozen=True, kw_only=True):
    family: str
    version: tuple[int, int, int]


class Capabilities(Struct, frozen=True, kw_only=True):
    identity: Identity
    supports: dict[str, bool]


FLAGS = {
    "budget_admin": "create_budget",
    "quota_admin": "create_quota_policy",
    "cancel_flow_wait_timeout": "cancel_flow",
    "cancel_flow_wait_indefinite": "cancel_flow",
    "stream_durable_summary": "read_summary",
    "stream_best_effort_live": "tail_stream",
    **{
        name: name
        for name in (
            "cancel_execution", "change_priority", "replay_execution", "revoke_lease",
            "read_execution_state", "read_execution_info", "get_execution_result",
            "rotate_waitpoint_hmac_secret_all", "seed_waitpoint_hmac_secret",
            "list_pending_waitpoints", "cancel_flow_header", "ack_cancel_member",
            "claim_for_worker", "issue_reclaim_grant", "prepare", "subscribe_lease_history",
            "subscribe_completion", "subscribe_signal_delivery", "subscribe_instance_tags",
            "register_worker", "heartbeat_worker", "mark_worker_dead", "list_expired_leases",
            "list_workers", "release_admission", "read_quota_policy_limits",
            "block_execution_for_admission", "read_budget_usage_and_limits",
        )
    },
}  # fmt: skip
"""Capability flags and the operation each one stands for."""


# Groups ---------------------------------------------------------------------
#
# A group holds the shell and the groups it uses. `Engine` has each of their operations under
# its own name. To add a group: build it in `_assemble`, and name its operations below.


class Flows(Completions, FlowBuilding, FlowAudits, FlowOperators, FlowReplays, FlowReads):
    """Building flows, working off endings, cancelling and replaying, reading."""


class Pauses(WaitpointKeys, Suspensions, SignalOperations):
    """Pausing, what is open, and delivering signals to it."""


class Reading(Reads, Details, Audits):
    """Executions in lists and one by one; looking for what must not be."""


class Following(Streams, Tails, Subscriptions):
    """What runs say, and what happens to them: appended, read and followed."""


def operation(
    group: str, method: Callable[Concatenate[G, P], T]
) -> Callable[Concatenate["Engine", P], T]:
    """A method of one of the engine's groups, as a method of the engine."""

    def call(self: "Engine", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(getattr(self, group), *args, **kwargs)

    functools.update_wrapper(call, method)
    return call


class Engine:
    """Every operation of FlowFabric. Use as an async context, or `close` it."""

    is_remote = False
    """Whether a server does the work, and so runs the reconcilers as well."""

    def __init__(
        self,
        store: Store,
        config: EngineConfig,
        deployment: Deployment,
        values: Values | None = None,
    ) -> None:
        self._assemble(Shell(store, config, deployment, values or Values(config.payload_bytes_max)))

    def _assemble(self, shell: Shell) -> None:
        self.shell = shell
        self.store = shell.store
        self.config = shell.config
        self.deployment = shell.deployment
        self.executions = Executions(shell)
        self.lanes = Lanes(shell)
        self.workers = Workers(shell)
        self.grants = Grants(shell, self.executions)
        self.keeping_back = KeepingBack(shell)
        self.schedules = Schedules(shell, self.executions)
        self.limits = LimitOperations(shell)
        self.flows = Flows(shell, self.executions)
        self.budgets = Budgets(shell, self.executions, self.flows)
        self.pauses = Pauses(shell)
        self.reading = Reading(shell)
        self.following = Following(shell)
        self.tokens = Tokens(shell)

    @classmethod
    async def open(
        cls, store: Store, config: EngineConfig | None = None, values: Values | None = None
    ) -> Self:
        """Open the store and read what its database was set up with."""
        await store.open()
        try:
            engine = cls(store, config or EngineConfig(), await read_deployment(store), values)
            await engine.register_configured_lanes()
            return engine
        except BaseException:
            await store.close()
            raise

    def on(self, connection: object, *, sync: bool = False) -> Self:
        """The same operations inside the open transaction of `connection`.

        See `create_executions_on` for what it may be. What they write exists if and when the
        transaction commits. With `sync` they never really wait, and run on the calling thread.
        """
        joined = copy.copy(self)
        joined._assemble(self.shell.on(connection, sync=sync))
        return joined

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.following.close_tails()
        await self.following.close_subscriptions()
        await self.store.close()

    async def prepare(self) -> Prepared:
        """Bring the schema up to date."""
        return Prepared(applied=tuple(await self.store.migrate()))

    async def ping(self) -> None:
        """One round trip to the database."""
        await self.store.ping()

    async def server_time_ms(self) -> int:
        """The clock every decision goes by."""
        return await self.store.read(lambda reader: reader.now_ms())

    async def shutdown_prepare(
        self,
        grace_ms: int = SHUTDOWN_GRACE_MS,
        *,
        drain: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Run `drain` for at most `grace_ms`, then close; overrun is an error, after closing."""
        check_int("grace_ms", grace_ms, 0, 24 * 60 * 60 * 1_000)
        try:
            if drain is not None:
                async with asyncio.timeout(grace_ms / 1_000):
                    await drain()
        except TimeoutError as error:
            raise OperationTimeout("shutdown_prepare", grace_ms) from error
        finally:
            await self.close()

    @property
    def codes_values(self) -> bool:
        """Whether payloads and results are stored otherwise than as they are."""
        return self.shell.values.coded

    @property
    def plain_bytes_max(self) -> int:
        """Largest payload or result that may be given to the engine."""
        return self.shell.values.plain_bytes_max

    @property
    def claims_again_in_s(self) -> float | None:
        """When a window opens that held up the last claim of limited work."""
        return self.executions.gated.again_in_s

    @property
    def waiting_tails(self) -> int:
        """How many readers of this process wait for frames."""
        return self.following.waiting_tails

    @property
    def routes(self) -> dict[Route, int]:
        """The routes this process has used recently."""
        return self.shell.routes

    def backend_label(self) -> str:
        return self.store.label

    def capabilities(self) -> Capabilities:
        major, minor, patch = (int(part) for part in __version__.split("."))
        return Capabilities(
            identity=Identity(family=self.store.label, version=(major, minor, patch)),
            supports={flag: hasattr(type(self), name) for flag, name in FLAGS.items()},
        )

    # What programs and tests check beforehand

    check_execution_id = operation("shell", Shell.check_execution_id)
    named_execution_id = operation("shell", Shell.named_execution_id)
    know_routes = operation("shell", Shell.know_routes)

    # The life of an execution

    check_request = operation("executions", Executions.check_request)
    check_terms = operation("executions", Executions.check_terms)
    check_payloads = operation("executions", Executions.check_payloads)
    create_execution = operation("executions", Executions.create_execution)
    create_executions = operation("executions", Executions.create_executions)
    create_checked = operation("executions", Executions.create_checked)
    create_executions_on = operation("executions", Executions.create_executions_on)
    create_checked_on = operation("executions", Executions.create_checked_on)
    create_executions_on_sync = operation("executions", Executions.create_executions_on_sync)
    create_checked_on_sync = operation("executions", Executions.create_checked_on_sync)
    enter_fence_on = operation("executions", Executions.enter_fence_on)
    leave_fence_on = operation("executions", Executions.leave_fence_on)
    enter_fence_on_sync = operation("executions", Executions.enter_fence_on_sync)
    leave_fence_on_sync = operation("executions", Executions.leave_fence_on_sync)
    claim = operation("executions", Executions.claim)
    claim_many = operation("executions", Executions.claim_many)
    find_claimed = operation("executions", Executions.find_claimed)
    renew = operation("executions", Executions.renew)
    renew_many = operation("executions", Executions.renew_many)
    find_lost_leases = operation("executions", Executions.find_lost_leases)
    renew_lease = operation("executions", Executions.renew_lease)
    record_steps = operation("executions", Executions.record_steps)
    list_steps = operation("executions", Executions.list_steps)
    await_executions = operation("executions", Executions.await_executions)
    wake_awaiting = operation("executions", Executions.wake_awaiting)
    hand_back = operation("executions", Executions.hand_back)
    hand_back_many = operation("executions", Executions.hand_back_many)
    complete = operation("flows", Flows.complete)
    complete_many = operation("flows", Flows.complete_many)
    complete_execution = operation("executions", Executions.complete_execution)
    to_store = operation("executions", Executions.to_store)
    from_store = operation("executions", Executions.from_store)
    fail = operation("executions", Executions.fail)
    fail_many = operation("executions", Executions.fail_many)
    fail_execution = operation("executions", Executions.fail_execution)
    delay = operation("executions", Executions.delay)
    wait_children = operation("executions", Executions.wait_children)
    progress = operation("executions", Executions.progress)
    cancel = operation("executions", Executions.cancel)
    delay_execution = operation("executions", Executions.delay_execution)
    move_to_waiting_children = operation("executions", Executions.move_to_waiting_children)
    update_progress = operation("executions", Executions.update_progress)
    block_on_code = operation("executions", Executions.block_on_code)
    release_blocked = operation("executions", Executions.release_blocked)
    accept_changes = operation("executions", Executions.accept_changes)
    cancel_execution = operation("executions", Executions.cancel_execution)
    cancel_executions = operation("executions", Executions.cancel_executions)
    revoke_lease = operation("executions", Executions.revoke_lease)
    change_priority = operation("executions", Executions.change_priority)
    mark_lease_expired_if_due = operation("executions", Executions.mark_lease_expired_if_due)
    promote_delayed = operation("executions", Executions.promote_delayed)
    expire_execution = operation("executions", Executions.expire_execution)
    expire_due_leases = operation("executions", Executions.expire_due_leases)
    promote_due_delays = operation("executions", Executions.promote_due_delays)
    expire_due_attempts = operation("executions", Executions.expire_due_attempts)
    expire_due_deadlines = operation("executions", Executions.expire_due_deadlines)
    next_due = operation("executions", Executions.next_due)
    trim_retention = operation("executions", Executions.trim_retention)
    trim_events = operation("executions", Executions.trim_events)
    trim_guards = operation("executions", Executions.trim_guards)
    trim_routes = operation("executions", Executions.trim_routes)

    # Lanes

    register_lane = operation("lanes", Lanes.register_lane)
    register_configured_lanes = operation("lanes", Lanes.register_configured_lanes)
    list_lanes = operation("lanes", Lanes.list_lanes)
    pause_lane = operation("lanes", Lanes.pause_lane)
    resume_lane = operation("lanes", Lanes.resume_lane)
    drain_lane = operation("lanes", Lanes.drain_lane)
    disable_lane = operation("lanes", Lanes.disable_lane)
    count_lanes = operation("lanes", Lanes.count_lanes)

    # Limits

    create_quota_policy = operation("limits", LimitOperations.create_quota_policy)
    read_quota_policy_limits = operation("limits", LimitOperations.read_quota_policy_limits)
    find_limit_namespaces = operation("limits", LimitOperations.find_limit_namespaces)
    check_admission = operation("limits", LimitOperations.check_admission)
    release_admission = operation("limits", LimitOperations.release_admission)
    declare_limits = operation("limits", LimitOperations.declare_limits)
    set_limit = operation("limits", LimitOperations.set_limit)
    remove_limit = operation("limits", LimitOperations.remove_limit)
    reset_limit = operation("limits", LimitOperations.reset_limit)
    read_limit = operation("limits", LimitOperations.read_limit)
    list_limits = operation("limits", LimitOperations.list_limits)
    list_limit_use = operation("limits", LimitOperations.list_limit_use)

    # Budgets

    create_budget = operation("budgets", Budgets.create_budget)
    update_budget = operation("budgets", Budgets.update_budget)
    get_budget_status = operation("budgets", Budgets.get_budget_status)
    read_budget_usage_and_limits = operation("budgets", Budgets.read_budget_usage_and_limits)
    list_budgets = operation("budgets", Budgets.list_budgets)
    post_to_budgets = operation("budgets", Budgets.post_to_budgets)
    report_usage = operation("budgets", Budgets.report_usage)
    report_usage_admin = operation("budgets", Budgets.report_usage_admin)
    record_spend = operation("budgets", Budgets.record_spend)
    release_budget = operation("budgets", Budgets.release_budget)
    reserve_budget = operation("budgets", Budgets.reserve_budget)
    settle_reservation = operation("budgets", Budgets.settle_reservation)
    reset_budget = operation("budgets", Budgets.reset_budget)
    remove_budget = operation("budgets", Budgets.remove_budget)
    reset_due_budgets = operation("budgets", Budgets.reset_due_budgets)
    check_reservations = operation("budgets", Budgets.check_reservations)
    act_on_breaches = operation("budgets", Budgets.act_on_breaches)
    trim_budgets = operation("budgets", Budgets.trim_budgets)

    # Grants

    claim_for_worker = operation("grants", Grants.claim_for_worker)
    issue_claim_grant = operation("grants", Grants.issue_claim_grant)
    issue_reclaim_grant = operation("grants", Grants.issue_reclaim_grant)
    claim_execution = operation("grants", Grants.claim_execution)
    claim_resumed_execution = operation("grants", Grants.claim_resumed_execution)
    claim_from_resume_grant = operation("grants", Grants.claim_from_resume_grant)
    reclaim_execution = operation("grants", Grants.reclaim_execution)
    issue_grant_and_claim = operation("grants", Grants.issue_grant_and_claim)
    return_due_grants = operation("grants", Grants.return_due_grants)
    block_execution_for_admission = operation(
        "keeping_back", KeepingBack.block_execution_for_admission
    )
    unblock_execution = operation("keeping_back", KeepingBack.unblock_execution)

    # Workers

    register_worker = operation("workers", Workers.register_worker)
    heartbeat_worker = operation("workers", Workers.heartbeat_worker)
    mark_worker_dead = operation("workers", Workers.mark_worker_dead)
    list_workers = operation("workers", Workers.list_workers)
    list_worker_events = operation("workers", Workers.list_worker_events)
    expire_workers = operation("workers", Workers.expire_workers)

    # Schedules

    upsert_schedule = operation("schedules", Schedules.upsert_schedule)
    remove_schedule = operation("schedules", Schedules.remove_schedule)
    pause_schedule = operation("schedules", Schedules.pause_schedule)
    resume_schedule = operation("schedules", Schedules.resume_schedule)
    trigger_schedule = operation("schedules", Schedules.trigger_schedule)
    describe_schedule = operation("schedules", Schedules.describe_schedule)
    list_schedules = operation("schedules", Schedules.list_schedules)
    fire_due_schedules = operation("schedules", Schedules.fire_due_schedules)

    # Flows

    check_flow_id = operation("flows", Flows.check_flow_id)
    flow_key = operation("flows", Flows.flow_key)
    create_flow = operation("flows", Flows.create_flow)
    add_execution_to_flow = operation("flows", Flows.add_execution_to_flow)
    stage_dependency_edge = operation("flows", Flows.stage_dependency_edge)
    apply_dependency_to_child = operation("flows", Flows.apply_dependency_to_child)
    set_edge_group_policy = operation("flows", Flows.set_edge_group_policy)
    trim_flows = operation("flows", Flows.trim_flows)
    new_member_id = operation("flows", Flows.new_member_id)
    add_dependencies = operation("flows", Flows.add_dependencies)
    dispatch_completions = operation("flows", Flows.dispatch_completions)
    cascade_completion = operation("flows", Flows.cascade_completion)
    resolve_dependency = operation("flows", Flows.resolve_dependency)
    apply_due_edges = operation("flows", Flows.apply_due_edges)
    read_execution_inputs = operation("flows", Flows.read_execution_inputs)
    audit_flows = operation("flows", Flows.audit_flows)
    cancel_flow = operation("flows", Flows.cancel_flow)
    cancel_flow_header = operation("flows", Flows.cancel_flow_header)
    cancel_pending_members = operation("flows", Flows.cancel_pending_members)
    ack_cancel_member = operation("flows", Flows.ack_cancel_member)
    reconcile_sibling_cancel_group = operation("flows", Flows.reconcile_sibling_cancel_group)
    replay_execution = operation("flows", Flows.replay_execution)
    replay_executions = operation("flows", Flows.replay_executions)
    cancel_matching = operation("flows", Flows.cancel_matching)
    replay_matching = operation("flows", Flows.replay_matching)
    describe_flow = operation("flows", Flows.describe_flow)
    list_flows = operation("flows", Flows.list_flows)
    list_flow_members = operation("flows", Flows.list_flow_members)
    list_edge_groups = operation("flows", Flows.list_edge_groups)
    find_named_flows = operation("flows", Flows.find_named_flows)
    list_edges = operation("flows", Flows.list_edges)
    describe_edge = operation("flows", Flows.describe_edge)
    evaluate_flow_eligibility = operation("flows", Flows.evaluate_flow_eligibility)
    read_flow_summary = operation("flows", Flows.read_flow_summary)
    project_flow_summary = operation("flows", Flows.project_flow_summary)
    set_flow_tag = operation("flows", Flows.set_flow_tag)
    set_flow_tags = operation("flows", Flows.set_flow_tags)
    get_flow_namespace = operation("flows", Flows.get_flow_namespace)
    get_flow_tag = operation("flows", Flows.get_flow_tag)

    # Pauses: suspensions, waitpoints and signals

    seed_waitpoint_hmac_secret = operation("pauses", Pauses.seed_waitpoint_hmac_secret)
    rotate_waitpoint_hmac_secret_all = operation("pauses", Pauses.rotate_waitpoint_hmac_secret_all)
    list_waitpoint_hmac_kids = operation("pauses", Pauses.list_waitpoint_hmac_kids)
    suspend = operation("pauses", Pauses.suspend)
    suspend_by_triple = operation("pauses", Pauses.suspend_by_triple)
    create_waitpoint = operation("pauses", Pauses.create_waitpoint)
    close_waitpoint = operation("pauses", Pauses.close_waitpoint)
    resume_execution = operation("pauses", Pauses.resume_execution)
    expire_suspension = operation("pauses", Pauses.expire_suspension)
    expire_due_suspensions = operation("pauses", Pauses.expire_due_suspensions)
    expire_due_waitpoints = operation("pauses", Pauses.expire_due_waitpoints)
    observe_signals = operation("pauses", Pauses.observe_signals)
    describe_suspension = operation("pauses", Pauses.describe_suspension)
    read_progress = operation("pauses", Pauses.read_progress)
    list_pending_waitpoints = operation("pauses", Pauses.list_pending_waitpoints)
    list_suspended = operation("pauses", Pauses.list_suspended)
    list_inbox = operation("pauses", Pauses.list_inbox)
    read_waitpoint_token = operation("pauses", Pauses.read_waitpoint_token)
    take_signals = operation("pauses", Pauses.take_signals)
    set_aside_signals = operation("pauses", Pauses.set_aside_signals)
    deliver_signal = operation("pauses", Pauses.deliver_signal)
    deliver_signal_on = operation("pauses", Pauses.deliver_signal_on)
    deliver_signal_on_sync = operation("pauses", Pauses.deliver_signal_on_sync)
    deliver_approval_signal = operation("pauses", Pauses.deliver_approval_signal)
    deliver_operator_signal = operation("pauses", Pauses.deliver_operator_signal)

    # Reading executions

    describe_execution = operation("reading", Reading.describe_execution)
    read_execution_context = operation("reading", Reading.read_execution_context)
    read_execution_state = operation("reading", Reading.read_execution_state)
    read_execution_info = operation("reading", Reading.read_execution_info)
    get_execution_result = operation("reading", Reading.get_execution_result)
    resolve_execution_flow_id = operation("reading", Reading.resolve_execution_flow_id)
    read_current_attempt_index = operation("reading", Reading.read_current_attempt_index)
    read_total_attempt_count = operation("reading", Reading.read_total_attempt_count)
    list_attempts = operation("reading", Reading.list_attempts)
    read_exec_core_fields = operation("reading", Reading.read_exec_core_fields)
    explain_execution = operation("reading", Reading.explain_execution)
    list_executions = operation("reading", Reading.list_executions)
    find_executions = operation("reading", Reading.find_executions)
    list_expired_leases = operation("reading", Reading.list_expired_leases)
    inspect_execution = operation("reading", Reading.inspect_execution)
    list_children = operation("reading", Reading.list_children)
    resolve_execution_id = operation("reading", Reading.resolve_execution_id)
    last_event_id = operation("reading", Reading.last_event_id)
    before_latest_events = operation("reading", Reading.before_latest_events)
    own_ids = operation("reading", Reading.own_ids)
    required_capabilities = operation("reading", Reading.required_capabilities)
    called = operation("reading", Reading.called)
    read_outcomes = operation("reading", Reading.read_outcomes)
    find_outcomes = operation("reading", Reading.find_outcomes)
    set_execution_tag = operation("reading", Reading.set_execution_tag)
    set_execution_tags = operation("reading", Reading.set_execution_tags)
    get_execution_tag = operation("reading", Reading.get_execution_tag)
    get_execution_namespace = operation("reading", Reading.get_execution_namespace)
    find_namespaces = operation("reading", Reading.find_namespaces)
    audit = operation("reading", Reading.audit)

    # What runs say, and what happens to them

    append_frame = operation("following", Following.append_frame)
    append_frames = operation("following", Following.append_frames)
    trim_streams = operation("following", Following.trim_streams)
    read_stream = operation("following", Following.read_stream)
    tail_stream = operation("following", Following.tail_stream)
    wait_for = operation("following", Following.wait_for)
    tail_execution = operation("following", Following.tail_execution)
    last_frame_at = operation("following", Following.last_frame_at)
    read_summary = operation("following", Following.read_summary)
    read_events = operation("following", Following.read_events)
    next_events = operation("following", Following.next_events)
    end_of_log = operation("following", Following.end_of_log)
    subscribe_events = operation("following", Following.subscribe_events)
    subscribe_completion = operation("following", Following.subscribe_completion)
    subscribe_lease_history = operation("following", Following.subscribe_lease_history)
    subscribe_signal_delivery = operation("following", Following.subscribe_signal_delivery)
    subscribe_instance_tags = operation("following", Following.subscribe_instance_tags)

    # Who may ask a server

    create_token = operation("tokens", Tokens.create_token)
    list_tokens = operation("tokens", Tokens.list_tokens)
    revoke_token = operation("tokens", Tokens.revoke_token)
    check_token = operation("tokens", Tokens.check_token)
    has_tokens = operation("tokens", Tokens.has_tokens)


class DeploymentRow(Struct, frozen=True, kw_only=True):
    num_flow_partitions: int
    num_budget_partitions: int
    num_quota_partitions: int
    handle_key: bytes


async def read_deployment(store: Store) -> Deployment:
    async def body(reader: Reader) -> Deployment:
        (row,) = await reader.select_as(DeploymentRow, "get_deployment")
        return Deployment(
            partitions=PartitionConfig(
                num_flow=row.num_flow_partitions,
                num_budget=row.num_budget_partitions,
                num_quota=row.num_quota_partitions,
            ),
            handle_key=row.handle_key,
        )

    return await store.read(body)
