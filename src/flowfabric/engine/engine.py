"""The engine: every operation, by its name, over any store.

`flowfabric.connect(url)` gives an open `Engine`. Its methods are grouped by noun
in the modules beside this one; each locks, lets the core decide, and saves.
"""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Coroutine
from typing import Final, NoReturn, Self

from msgspec import Struct

from flowfabric.config import EngineConfig
from flowfabric.core.checks import check_int
from flowfabric.core.ids import PartitionConfig
from flowfabric.engine.audit import Audits
from flowfabric.engine.details import Details
from flowfabric.engine.events import Subscriptions
from flowfabric.engine.flow_endings import FlowAudits, FlowEndings
from flowfabric.engine.flow_members import FlowMembers
from flowfabric.engine.flow_operators import FlowOperators, FlowReplays
from flowfabric.engine.flow_reads import FlowReads
from flowfabric.engine.reads import Reads
from flowfabric.engine.schedules import Schedules
from flowfabric.engine.signals import SignalOperations
from flowfabric.engine.steps import Steps
from flowfabric.engine.streams import Streams
from flowfabric.engine.suspensions import Suspensions
from flowfabric.engine.tails import Tails
from flowfabric.engine.unit import Deployment
from flowfabric.engine.waitpoints import KeptSignals
from flowfabric.engine.work import Work
from flowfabric.errors import OperationTimeout, Unavailable
from flowfabric.store.base import Reader, Store
from flowfabric.store.foreign import OnConnection
from flowfabric.version import __version__

# Operations of the specification that this engine does not have yet ---------
#
# Each exists under its name and says so, whatever it is given.

NAMES: Final = (
    "block_execution_for_admission",
    "check_admission",
    "claim_for_worker",
    "create_budget",
    "create_quota_policy",
    "get_budget_status",
    "heartbeat_worker",
    "issue_grant_and_claim",
    "issue_reclaim_grant",
    "list_workers",
    "mark_worker_dead",
    "read_budget_usage_and_limits",
    "read_quota_policy_limits",
    "reclaim_execution",
    "record_spend",
    "register_worker",
    "release_admission",
    "release_budget",
    "report_usage",
    "report_usage_admin",
    "reset_budget",
    "subscribe_instance_tags",
    "unblock_execution",
)


def _unavailable(name: str) -> Callable[..., Coroutine[object, object, NoReturn]]:
    async def operation(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise Unavailable(name)

    operation.__name__ = name
    operation.__doc__ = f"Not there yet: raises `Unavailable({name!r})`."
    return operation


class Unimplemented:
    """What answers `Unavailable`."""


for _name in NAMES:
    setattr(Unimplemented, _name, _unavailable(_name))

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
            "cancel_execution",
            "change_priority",
            "replay_execution",
            "revoke_lease",
            "read_execution_state",
            "read_execution_info",
            "get_execution_result",
            "rotate_waitpoint_hmac_secret_all",
            "seed_waitpoint_hmac_secret",
            "list_pending_waitpoints",
            "cancel_flow_header",
            "ack_cancel_member",
            "claim_for_worker",
            "issue_reclaim_grant",
            "prepare",
            "subscribe_lease_history",
            "subscribe_completion",
            "subscribe_signal_delivery",
            "subscribe_instance_tags",
            "register_worker",
            "heartbeat_worker",
            "mark_worker_dead",
            "list_expired_leases",
            "list_workers",
            "release_admission",
            "read_quota_policy_limits",
            "block_execution_for_admission",
            "read_budget_usage_and_limits",
        )
    },
}
"""Capability flags and the operation each one stands for."""


class Engine(
    Schedules,
    Work,
    Steps,
    Streams,
    Tails,
    Details,
    FlowReplays,
    Reads,
    Subscriptions,
    Audits,
    Suspensions,
    SignalOperations,
    KeptSignals,
    FlowMembers,
    FlowEndings,
    FlowAudits,
    FlowOperators,
    FlowReads,
    Unimplemented,
):
    """Every operation of FlowFabric. Use as an async context, or `close` it."""

    @classmethod
    async def open(cls, store: Store, config: EngineConfig | None = None) -> Self:
        """Open the store and read what its database was set up with."""
        await store.open()
        try:
            engine = cls(store, config or EngineConfig(), await read_deployment(store))
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
        joined.store = OnConnection(self.store, connection, sync=sync)
        joined.creates_alone = False
        # Routes that are registered in there may be rolled back.
        joined.routes = dict(self.routes)
        return joined

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.close_tails()
        await self.close_subscriptions()
        await self.store.close()

    async def prepare(self) -> Prepared:
        """Bring the schema up to date."""
        return Prepared(applied=tuple(await self.store.migrate()))

    async def ping(self) -> None:
        """One round trip to the database."""
        await self.store.ping()

    async def server_time_ms(self) -> int:
        """The clock every decision goes by."""

        async def body(reader: Reader) -> int:
            return await reader.now_ms()

        return await self.store.read(body)

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
    def plain_bytes_max(self) -> int:
        """Largest payload or result that may be given to the engine."""
        return self.config.payload_bytes_max

    def backend_label(self) -> str:
        return self.store.label

    def capabilities(self) -> Capabilities:
        major, minor, patch = (int(part) for part in __version__.split("."))
        return Capabilities(
            identity=Identity(family=self.store.label, version=(major, minor, patch)),
            supports={flag: hasattr(type(self), name) for flag, name in FLAGS.items()},
        )


async def read_deployment(store: Store) -> Deployment:
    async def body(reader: Reader) -> Deployment:
        (row,) = await reader.select("get_deployment")
        key = row["handle_key"]
        assert isinstance(key, bytes)
        return Deployment(
            partitions=PartitionConfig(
                num_flow=int(str(row["num_flow_partitions"])),
                num_budget=int(str(row["num_budget_partitions"])),
                num_quota=int(str(row["num_quota_partitions"])),
            ),
            handle_key=key,
        )

    return await store.read(body)
