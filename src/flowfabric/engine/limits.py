"""Limits: policies, which may change while work goes on, and slots taken by hand.

How claims ask the gates of policies is in `engine.gated_claims`. A program declares its
limits each time it starts. A value set at run time wins over that until it is reset.
"""

import random
from collections.abc import Sequence

from msgspec import Struct, structs

from flowfabric.core import gates
from flowfabric.core.bounds import BATCH_MAX, PAGE_MAX
from flowfabric.core.checks import check_int, check_list, check_name, optional
from flowfabric.core.decisions import Changes
from flowfabric.core.ids import (
    GateId,
    Namespace,
    QuotaPolicyId,
    parse_namespace,
    parse_uuid,
    partition_of,
    uuid_of,
)
from flowfabric.core.limits import (
    WINDOW_MS_MAX,
    DeclaredLimit,
    LimitSource,
    QuotaPolicy,
    QuotaSpec,
    WhileSuspended,
    changed_policy,
    check_declared,
    check_spec,
    check_while_suspended,
    declared_spec,
    new_policy,
    policy_id_of,
)
from flowfabric.core.records import Execution
from flowfabric.core.results import AlreadySatisfied
from flowfabric.core.states import TERMINAL_STATES
from flowfabric.engine import paging, shell
from flowfabric.engine.gates import (
    GATES_TOPIC,
    GateRow,
    check_name_free,
    declare,
    gates_of,
    have_policies,
    load,
    save_policies,
)
from flowfabric.errors import Conflict, InvalidInput, NotFound, Terminal
from flowfabric.store.base import Key, Reader, Transaction

DEFAULT_DIMENSION = "default"


class PolicyCreated(Struct, frozen=True, kw_only=True, tag=True):
    quota_policy_id: QuotaPolicyId


class QuotaLimits(Struct, frozen=True, kw_only=True):
    """The limits of a policy; 0 is no limit."""

    max_requests_per_window: int
    requests_per_window_seconds: int
    active_concurrency_cap: int
    jitter_ms: int
    while_suspended: WhileSuspended = WhileSuspended.RELEASE


class AdmissionReleased(Struct, frozen=True, tag=True):
    """The execution holds no slot of the policy, whether or not it held one before."""


class LimitPage(Struct, frozen=True, kw_only=True):
    limits: tuple[QuotaPolicy, ...]
    next_cursor: str | None


class GateUse(Struct, frozen=True, kw_only=True):
    """What one value of a limit's key uses."""

    key: str
    running: int
    started: int
    """In the window that ends now."""
    opens_at_ms: int | None


class GatePage(Struct, frozen=True, kw_only=True):
    gates: tuple[GateUse, ...]
    next_cursor: str | None


class LimitOperations(shell.Group):
    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int = 0,
        max_requests_per_window: int = 0,
        max_concurrent: int = 0,
        jitter_ms: int = 0,
        while_suspended: str = WhileSuspended.RELEASE,
        namespace: str = "default",
        name: str | None = None,
    ) -> PolicyCreated | AlreadySatisfied:
        """Create a policy; 0 means no limit. An existing policy keeps its limits.

        The name defaults to the id.
        """
        check_int("window_seconds", window_seconds, 0, WINDOW_MS_MAX // 1_000)
        spec = check_spec(
            QuotaSpec(
                window_ms=window_seconds * 1_000,
                max_requests_per_window=max_requests_per_window,
                active_concurrency_cap=max_concurrent,
                jitter_ms=jitter_ms,
                while_suspended=check_while_suspended(while_suspended),
            )
        )
        policy_id = QuotaPolicyId(parse_uuid("quota_policy_id", quota_policy_id))
        owner = parse_namespace(namespace)
        own_name = policy_id if name is None else check_name("name", name)

        async def body(tx: Transaction) -> PolicyCreated | AlreadySatisfied:
            now_ms, stored = await tx.now_ms(), LimitSource.STORED
            policy = new_policy(policy_id, owner, own_name, spec, stored, now_ms)
            if await tx.insert_new([policy]):
                return PolicyCreated(quota_policy_id=policy_id)
            if not await tx.get(QuotaPolicy, [(policy_id,)]):
                await check_name_free(tx, policy)
            return AlreadySatisfied(reason="exists")

        return await self.store.transact(body)

    async def read_quota_policy_limits(self, quota_policy_id: str) -> QuotaLimits | None:
        """The limits of a policy; None if it does not exist."""
        policy_id = parse_uuid("quota_policy_id", quota_policy_id)
        policy = await self.get_one(QuotaPolicy, (policy_id,))
        if policy is None:
            return None
        return QuotaLimits(
            max_requests_per_window=policy.max_requests_per_window,
            requests_per_window_seconds=-(-policy.window_ms // 1_000),
            active_concurrency_cap=policy.active_concurrency_cap,
            jitter_ms=policy.jitter_ms,
            while_suspended=policy.while_suspended,
        )

    async def find_limit_namespaces(self, quota_policy_ids: Sequence[str]) -> dict[str, Namespace]:
        """The namespaces of the policies that exist."""
        keys = {each: (parse_uuid("quota_policy_id", each),) for each in quota_policy_ids}
        if not keys:
            return {}
        policies = await self.store.read(
            lambda reader: reader.get(QuotaPolicy, sorted(set(keys.values())))
        )
        return {each: policies[key].namespace for each, key in keys.items() if key in policies}

    async def check_admission(
        self,
        quota_policy_id: str,
        execution_id: str,
        *,
        dimension: str = DEFAULT_DIMENSION,
        window_seconds: int = 0,
        rate_limit: int = 0,
        concurrency_cap: int = 0,
        jitter_ms: int = 0,
    ) -> gates.AdmissionOutcome:
        """Take a slot for an execution by hand, if there is one.

        It is held until the execution ends or `release_admission`; `dimension` is a value of the
        policy's key. The limits named here apply only if there is no such policy. Executions
        submitted under the policy are refused: claiming them takes the slots.
        """
        policy_id = parse_uuid("quota_policy_id", quota_policy_id)
        key = "" if dimension in ("", DEFAULT_DIMENSION) else gates.check_gate_key(dimension)
        check_int("window_seconds", window_seconds, 0, WINDOW_MS_MAX // 1_000)
        spec = QuotaSpec(
            window_ms=window_seconds * 1_000,
            max_requests_per_window=rate_limit,
            active_concurrency_cap=concurrency_cap,
            jitter_ms=jitter_ms,
        )
        check_spec(spec, may_be_empty=True)
        name = gates.GateName(gates.GateOwner.QUOTA, policy_id, key)
        execution_key = shell.execution_key(self.shell.check_execution_id(execution_id))
        chance = random.random()
        return await self.store.transact(lambda tx: _admit(tx, name, spec, execution_key, chance))

    async def release_admission(self, quota_policy_id: str, execution_id: str) -> AdmissionReleased:
        """Release the slot taken by `check_admission`. Idempotent."""
        policy_id = parse_uuid("quota_policy_id", quota_policy_id)
        checked = self.shell.check_execution_id(execution_id)

        async def body(tx: Transaction) -> AdmissionReleased:
            held = await tx.select_records(
                gates.Admission,
                "admissions_of",
                owner_id=policy_id,
                partition_key=partition_of(checked),
                execution_id=uuid_of(checked),
            )
            if held:
                await tx.save(Changes(deletes=tuple(held)))
                tx.hint(GATES_TOPIC)
            return AdmissionReleased()

        return await self.store.transact(body)

    # Limits by name, as programs declare them and people change them ---------

    async def declare_limits(self, limits: Sequence[DeclaredLimit]) -> list[QuotaPolicy]:
        """Store the limits of a program, and return the policies that apply now.

        New and changed limits take effect, except where a value was set at run time.
        """
        check_list("limits", limits, 0, BATCH_MAX)
        checked = [check_declared(each) for each in limits]
        return await self.store.transact(lambda tx: declare(tx, checked))

    async def set_limit(
        self,
        name: str,
        *,
        namespace: str = "default",
        window_ms: int = 0,
        max_requests_per_window: int = 0,
        active_concurrency_cap: int = 0,
        jitter_ms: int = 0,
        while_suspended: str | None = None,
    ) -> QuotaPolicy:
        """Set a limit at run time; 0 is no limit. It wins over what programs declare.

        If omitted, `while_suspended` stays as it is.
        """
        spec = QuotaSpec(
            window_ms=window_ms,
            max_requests_per_window=max_requests_per_window,
            active_concurrency_cap=active_concurrency_cap,
            jitter_ms=jitter_ms,
        )
        check_spec(spec, may_be_empty=True)
        fate = optional(check_while_suspended, while_suspended)
        owner, own_name = parse_namespace(namespace), check_name("name", name)

        async def body(tx: Transaction) -> QuotaPolicy:
            now_ms, stored = await tx.now_ms(), LimitSource.STORED
            policy_id = await _policy_id(tx, owner, own_name)
            new = new_policy(policy_id, owner, own_name, spec, stored, now_ms)
            locked = await have_policies(tx, [new])
            before = locked[(policy_id,)]
            wanted = structs.replace(spec, while_suspended=fate or before.while_suspended)
            policy = changed_policy(before, wanted, stored, now_ms)
            await save_policies(tx, locked, [policy])
            return policy

        return await self.store.transact(body)

    async def remove_limit(self, name: str, *, namespace: str = "default") -> QuotaPolicy:
        """Forget a limit that no work is under; return what it was.

        A program that declares it brings it back when it starts or submits. Raises `Conflict` if
        work that has not been deleted is under it; `set_limit` without values lifts such a limit.
        """
        owner, own_name = parse_namespace(namespace), check_name("name", name)

        async def body(tx: Transaction) -> QuotaPolicy:
            policy = await _lock_policy(tx, owner, own_name)
            used = await tx.select_records(
                gates.Gate, "gates_of_owner", owner_id=policy.quota_policy_id, after=None, limit=1
            )
            if used:
                raise Conflict(
                    f"limit {policy.name!r} has runs, ended or not, that are not deleted yet; until"
                    " then, set it without a rate and a concurrency: it limits nothing"
                )
            await tx.save(Changes(deletes=(policy,)))
            return policy

        return await self.store.transact(body)

    async def reset_limit(self, name: str, *, namespace: str = "default") -> QuotaPolicy:
        """Apply what programs declare again."""
        owner, own_name = parse_namespace(namespace), check_name("name", name)

        async def body(tx: Transaction) -> QuotaPolicy:
            before = await _lock_policy(tx, owner, own_name)
            spec = declared_spec(before)
            if spec is None:
                problem = f"{own_name} in any program; set another value or remove it"
                raise NotFound("limit", problem)
            policy = changed_policy(before, spec, LimitSource.CODE, await tx.now_ms())
            await save_policies(tx, {(before.quota_policy_id,): before}, [policy])
            return policy

        return await self.store.transact(body)

    async def list_limits(
        self, *, namespace: str | None = None, cursor: str | None = None, limit: int = 100
    ) -> LimitPage:
        """Policies by namespace and name, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        owner = optional(parse_namespace, namespace)
        policies = await self.select_records(
            QuotaPolicy,
            "list_quota_policies",
            namespace=owner,
            limit=limit + 1,
            **paging.by_name(cursor),
        )
        page, last = paging.cut_by_name(policies, limit, lambda each: each.name)
        return LimitPage(limits=page, next_cursor=last)

    async def read_limit(self, name: str, *, namespace: str = "default") -> QuotaPolicy:
        """The policy with this name."""
        owner, own_name = parse_namespace(namespace), check_name("name", name)

        async def body(reader: Reader) -> QuotaPolicy:
            policy_id = await _policy_id(reader, owner, own_name)
            policy = await reader.get_one(QuotaPolicy, (policy_id,))
            if policy is None:
                raise NotFound("limit", own_name)
            return policy

        return await self.store.read(body)

    async def list_limit_use(
        self, quota_policy_id: str, *, cursor: str | None = None, limit: int = 100
    ) -> GatePage:
        """What each value of a policy's key uses now, by key, after `cursor`."""
        check_int("limit", limit, 0, PAGE_MAX)
        policy_id = parse_uuid("quota_policy_id", quota_policy_id)
        after = optional(gates.check_gate_key, cursor)

        async def body(reader: Reader) -> list[GateRow]:
            keys = await reader.select_records(
                gates.Gate, "gates_of_owner", owner_id=policy_id, after=after, limit=limit + 1
            )
            # Counted whether or not the policy caps it.
            return await load(reader, [each.gate_id for each in keys], always=True)

        rows = sorted(await self.store.read(body), key=lambda row: row.gate_key)
        page, last = paging.cut(rows, limit, lambda row: row.gate_key)
        return GatePage(gates=tuple(_use(row) for row in page), next_cursor=last)


async def _admit(
    tx: Transaction, name: gates.GateName, spec: QuotaSpec, key: Key, chance: float
) -> gates.AdmissionOutcome:
    """Take a slot for an execution by hand. `spec` applies if there is no such policy."""
    execution = await tx.get_one(Execution, key)
    if execution is None:
        raise NotFound("execution", str(key[1]))
    gate_id = name.gate_id
    if not await tx.lock(gates.Gate, [(gate_id,)]):
        await tx.insert_new([name.new()])
        await tx.lock(gates.Gate, [(gate_id,)])
    (row,) = await load(tx, [gate_id], always=True)
    if not row.has_policy and spec == QuotaSpec():
        raise NotFound("quota_policy", name.owner_id)
    await _check_needs_slot(tx, execution, gate_id)
    held = await tx.lock_one(gates.Admission, (gate_id, *key))
    if held is not None and held.replay_count == execution.replay_count:
        return gates.AlreadyAdmitted()
    state = row.state if row.has_policy else structs.replace(row.state, limits=spec.limits)
    jitter_ms = row.jitter_ms if row.has_policy else spec.jitter_ms
    outcome = gates.decide_admission(state, jitter_ms, chance, row.now_ms)
    if isinstance(outcome, gates.Admitted):
        admission = gates.Admission(
            gate_id=gate_id,
            partition_key=execution.partition_key,
            execution_id=execution.execution_id,
            replay_count=execution.replay_count,
            admitted_at_ms=row.now_ms,
        )
        await tx.save(Changes(updates=(admission, state.after(1, row.now_ms))))
        await tx.select("trim_admissions", gate_id=gate_id)
    return outcome


async def _check_needs_slot(tx: Transaction, execution: Execution, gate_id: GateId) -> None:
    if execution.public_state in TERMINAL_STATES:
        raise Terminal(f"execution {execution.called} has ended; it needs no slot")
    if gate_id in await gates_of(tx, execution.route_id):
        raise InvalidInput(
            "execution_id",
            "was submitted under this limit, so its claims take slots by themselves",
            execution.called,
        )


async def _policy_id(reader: Reader, namespace: str, name: str) -> QuotaPolicyId:
    """The id of the policy with a name, or the id that it would get."""
    stored = await reader.select_as(
        QuotaPolicyId, "quota_policy_id_by_name", namespace=namespace, called=name
    )
    return stored[0] if stored else policy_id_of(namespace, name)


async def _lock_policy(tx: Transaction, namespace: str, name: str) -> QuotaPolicy:
    policy_id = await _policy_id(tx, namespace, name)
    policy = await tx.lock_one(QuotaPolicy, (policy_id,))
    if policy is None:
        raise NotFound("limit", name)
    return policy


def _use(row: GateRow) -> GateUse:
    window = gates.trimmed(gates.read_window(row.starts), row.window_ms, row.now_ms)
    return GateUse(
        key=row.gate_key,
        running=row.state.in_use,
        started=gates.counted(window),
        opens_at_ms=row.state.opens_at_ms(row.now_ms),
    )
