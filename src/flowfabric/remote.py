"""An engine without a database: it asks a server over HTTP.

`RemoteEngine` has every operation of `Engine` under its name, with the same types and errors.
It decides locally what it can, such as whether a request is valid, and asks the server for the
rest. Whatever needs the database itself is refused with `Unavailable`.

A call that is safe to repeat is repeated if its answer is lost, and so are submissions, which
have an id from the start. The errors of other calls say that they may have happened.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn, Self
from urllib.parse import urlsplit

import httpx
import msgspec
from msgspec import Struct, structs

from flowfabric.config import EngineConfig
from flowfabric.core.bounds import KEY_WAIT_MS
from flowfabric.core.creation import Checked, NewExecution
from flowfabric.core.events import EventFilter, LogEnd
from flowfabric.core.gates import LimitUse
from flowfabric.core.ids import PartitionConfig
from flowfabric.core.policies import encode_policy, parse_policy
from flowfabric.core.results import CreateResult
from flowfabric.engine import shell, topics
from flowfabric.engine.engine import Engine, Following
from flowfabric.engine.events import LOOK_AGAIN_MAX_S, LOOK_AGAIN_S, ToldPage
from flowfabric.engine.shell import Shell
from flowfabric.engine.values import Values
from flowfabric.errors import (
    AccessDenied,
    BackendErrorKind,
    Bug,
    InvalidInput,
    PayloadTooLarge,
    ResourceExhausted,
    Transport,
    Unauthorized,
    Unavailable,
    Validation,
)
from flowfabric.logs import open_log
from flowfabric.operations import (
    BODY_BYTES_MAX,
    OPERATIONS,
    PROTOCOL,
    WAITS,
    DeploymentView,
    RemoteOperation,
    WireError,
    encode_arguments,
    raised_again,
)
from flowfabric.outages import AFTER_ERROR_S, ASK_AGAIN, OutageWatch, level_of, patience_s
from flowfabric.store.base import HintListener
from flowfabric.store.hints import EVERY_TOPIC, HintBoard
from flowfabric.store.urls import redact
from flowfabric.version import __version__

log = open_log(__name__)

BACKEND: Final = "http"
JOINING: Final = "a transaction of yours (connection=, ctx.fence)"
ANSWER_S: Final = 60.0
"""How long an answer may take, unless the caller says otherwise or asks the server to wait."""
CONNECT_S: Final = 10.0
PAUSES_S: Final = (0.05, 0.1, 0.2)
"""Pauses before each retry."""
CONNECTIONS_MAX: Final = 1_000
KEPT_CONNECTIONS: Final = 20
HINTS_SILENT_S: Final = 40.0
"""A stream of hints that is silent for this long, without even a ping, is broken."""
EVENT_TOPICS: Final = (
    topics.EVENT_TOPIC,
    topics.COMPLETION_TOPIC,
    topics.LOST_TOPIC,
    topics.ATTEMPT_TOPIC,
)
BY_ITSELF: Final = frozenset({"to_store", "from_store"})
"""Operations that need the server only if payloads go through a codec there."""
TRANSIENT: Final = frozenset({"server", "stream_ops"})
"""What a stopping server calls unavailable: asking again reaches another one."""


class RefusalBody(Struct, kw_only=True):
    """The body of an answer that reports an error."""

    error: str
    code: str = ""
    field: str | None = None
    limit_bytes: int = 0
    raised: WireError | None = None


def needs_database(what: str) -> Unavailable:
    return Unavailable(
        what, "needs the database itself, and this app reaches it through a server only"
    )


# Asking -----------------------------------------------------------------------


def check_bearer(token: str) -> str:
    """A token without the blanks that files add. The error does not repeat a wrong one."""
    bare = token.strip()
    if not bare or not bare.isascii() or not bare.isprintable() or " " in bare:
        raise InvalidInput("token", "must be a token that `flowfabric tokens create` has shown")
    return bare


def check_address(url: str) -> str:
    """The URL of a server; refused if it contains a user or an impossible port."""
    try:
        parts = urlsplit(url)
        named, _ = parts.username or parts.password, parts.port
    except ValueError as error:
        raise InvalidInput("url", f"cannot be asked: {error}", redact(url)) from None
    if named:
        raise InvalidInput("url", "must not contain a user: a server takes a token", redact(url))
    return url


class HttpConnection:
    """The connection to one server, on one event loop."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = check_address(url)
        self.server_version = __version__
        headers = {"User-Agent": f"flowfabric/{__version__}", "Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {check_bearer(token)}"
        self._client = httpx.AsyncClient(
            base_url=url,
            headers=headers,
            limits=httpx.Limits(
                max_connections=CONNECTIONS_MAX, max_keepalive_connections=KEPT_CONNECTIONS
            ),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def describe(self) -> DeploymentView:
        body = await self._ask("GET", "v1/deployment", None, ANSWER_S, repeatable=True)
        try:
            deployment = msgspec.json.decode(body, type=DeploymentView)
        except msgspec.DecodeError:
            raise Unavailable(self.url, "is not a FlowFabric server of this version") from None
        self.server_version = deployment.version
        if deployment.protocol != PROTOCOL:
            raise Unavailable(
                self.url,
                f"is a server of flowfabric {deployment.version}, which calls operations in another"
                f" way than {__version__} here; install the same version on both sides",
            )
        return deployment

    async def call(self, operation: RemoteOperation, arguments: Mapping[str, object]) -> object:
        """The server's answer; a batch too large for one request is split into several, and so is
        one of which a request cannot travel, where each gets its own answer."""
        batch = arguments.get(operation.batch or "")
        items = batch if isinstance(batch, list) else []
        try:
            body = encode_arguments(arguments)
        except Validation as refused:
            if not operation.answers_each:
                raise
            if len(items) < 2:
                return [refused]
        else:
            if len(body) <= BODY_BYTES_MAX or len(items) < 2:
                return await self._call(operation, arguments, body)
        answers: list[object] = []
        for half in (items[: len(items) // 2], items[len(items) // 2 :]):
            answered = await self.call(operation, {**arguments, str(operation.batch): half})
            assert isinstance(answered, list)
            answers += answered
        return answers

    async def _call(
        self, operation: RemoteOperation, arguments: Mapping[str, object], body: bytes
    ) -> object:
        wait_ms = arguments.get("block_ms", 0)
        wait_s = wait_ms / 1_000 if isinstance(wait_ms, int) else 0.0
        limit_s: float | None = ANSWER_S + wait_s
        if operation.name in WAITS and "wait" in arguments:
            limit_s = None
        answer = await self._ask(
            "POST",
            f"v1/operations/{operation.name}",
            body,
            patience_s(limit_s),
            repeatable=operation.repeatable or _has_ids(arguments),
        )
        try:
            return operation.decode_result(answer)
        except msgspec.DecodeError as error:
            raise Bug(
                f"{operation.name}: the server answers what cannot be read: {error}{self._versions}"
            ) from error

    @property
    def _versions(self) -> str:
        """Both versions, which may explain an error; empty if they are the same."""
        if self.server_version == __version__:
            return ""
        return f" (the server is flowfabric {self.server_version}, this is {__version__})"

    async def _ask(
        self,
        method: str,
        path: str,
        body: bytes | None,
        within_s: float | None,
        *,
        repeatable: bool,
    ) -> bytes:
        until_s = None if within_s is None else time.monotonic() + within_s
        with OutageWatch(self.url):
            for pause_s in PAUSES_S:
                try:
                    return await self._ask_once(method, path, body, until_s)
                except Transport as error:
                    late = until_s is not None and time.monotonic() + pause_s >= until_s
                    safe = repeatable or not error.may_have_happened
                    if late or not (safe and error.kind.retryable):
                        raise
                    log.debug("%s: asking again: %s", path, error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            return await self._ask_once(method, path, body, until_s)

    async def _ask_once(
        self, method: str, path: str, body: bytes | None, until_s: float | None
    ) -> bytes:
        left_s = None if until_s is None else max(until_s - time.monotonic(), 0.001)
        connect_s = CONNECT_S if left_s is None else min(CONNECT_S, left_s)
        timeout = httpx.Timeout(left_s, connect=connect_s, pool=connect_s)
        try:
            answer = await self._client.request(method, path, content=body, timeout=timeout)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            raise self._away(error, may_have_happened=False) from error
        except httpx.TransportError as error:
            raise self._away(error, may_have_happened=method == "POST") from error
        if answer.is_success:
            return answer.content
        raise self._refusal(answer)

    def _away(self, error: httpx.TransportError, *, may_have_happened: bool) -> Transport:
        timed_out = isinstance(error, httpx.TimeoutException)
        reason = str(error) or type(error).__name__
        return Transport(
            BACKEND,
            f"{self.url} {'does not answer' if timed_out else 'cannot be reached'}: {reason}",
            kind=BackendErrorKind.TIMEOUT if timed_out else BackendErrorKind.TRANSPORT,
            may_have_happened=may_have_happened,
        )

    def _refusal(self, answer: httpx.Response) -> Exception:
        """The error raised at the server, or the equivalent of its refusal."""
        status = answer.status_code
        try:
            refusal = msgspec.json.decode(answer.content, type=RefusalBody)
        except msgspec.DecodeError:
            refusal = RefusalBody(error=f"it answers {status}, and not as a FlowFabric server does")
            if status < 500:
                return Unavailable(self.url, refusal.error)
        if refusal.raised is not None:
            raised = raised_again(refusal.raised)
            if isinstance(raised, Unavailable) and raised.op in TRANSIENT:
                return Transport(BACKEND, str(raised), kind=BackendErrorKind.TRANSPORT)
            return raised
        if status in (401, 403):
            denied = Unauthorized if status == 401 else AccessDenied
            return denied(self.url, refusal.error, refusal.code)
        if status == 404:
            message = f"does not know what it is asked for: {refusal.error}{self._versions}"
            return Unavailable(self.url, message)
        if status == 413:
            size = answer.request.headers.get("content-length", "0")
            return PayloadTooLarge("request", refusal.limit_bytes, int(size))
        if status == 429:
            error = ResourceExhausted(self.url, 1, _retry_after_ms(answer))
            error.detail, error.args = refusal.error, (refusal.error,)
            return error
        if status >= 500:
            return Transport(
                BACKEND,
                f"{self.url}: {refusal.error}",
                kind=BackendErrorKind.TRANSPORT if status != 500 else BackendErrorKind.OTHER,
                may_have_happened=status != 503,
            )
        return InvalidInput(refusal.field or "request", refusal.error + self._versions)

    async def hints(self, topics: Sequence[str], heard: Callable[[str, str], None]) -> None:
        """Pass on hints from the server until it or the network ends the stream.

        Raises `AccessDenied` if the server does not accept the token.
        """
        timeout = httpx.Timeout(HINTS_SILENT_S, connect=CONNECT_S)
        params = {"topic": list(topics)}
        event = ""
        with suppress(httpx.TransportError):
            async with self._client.stream(
                "GET", "v1/hints", params=params, timeout=timeout
            ) as answer:
                if answer.status_code in (401, 403):
                    await answer.aread()
                    raise self._refusal(answer)
                if not answer.is_success:
                    return
                async for line in answer.aiter_lines():
                    name, _, value = line.partition(": ")
                    if name == "event":
                        event = value
                    elif name == "data":
                        heard(event, value)


def _has_ids(arguments: Mapping[str, object]) -> bool:
    """Whether it creates executions that have ids: asking again finds them."""
    requests = arguments.get("requests", [arguments.get("request")])
    return isinstance(requests, list) and all(
        isinstance(each, NewExecution) and (each.execution_id or each.idempotency_key)
        for each in requests
    )


def _retry_after_ms(answer: httpx.Response) -> int | None:
    text = answer.headers.get("retry-after", "")
    return int(text) * 1_000 if text.isdigit() else None


# Where the engine expects a database -------------------------------------------


class RemoteStore(HintBoard):
    """Takes the place of a store, but has only hints from the server; without them, listeners
    poll."""

    writes_beside = False
    backend_tag = 0

    def __init__(self, connection: HttpConnection, label: str) -> None:
        super().__init__()
        self.label = label
        self.live = False
        self._connection = connection
        self._wanted: set[str] = set()
        self._more = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None: ...

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._connection.close()

    def hints(self, topics: Sequence[str]) -> HintListener:
        if not self._wanted.issuperset(topics):
            self._wanted.update(topics)
            self._more.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._hear(), name="flowfabric-hints")
        return self.listen(topics)

    def hint(self, topic: str) -> None:
        self.publish([topic])

    @property
    def hints_are_live(self) -> bool:
        return self.live

    async def _hear(self) -> None:
        """Listen until the server refuses the token: repeating it would look like guessing."""
        while True:
            self._more.clear()
            hearing = asyncio.ensure_future(
                self._connection.hints(sorted(self._wanted), self._heard)
            )
            more = asyncio.ensure_future(self._more.wait())
            try:
                await asyncio.wait({hearing, more}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self.live = self.live and more.done()
                for task in (hearing, more):
                    task.cancel()
                await asyncio.gather(hearing, more, return_exceptions=True)
            if not hearing.cancelled() and hearing.exception() is not None:
                return
            if not self._more.is_set():
                await asyncio.sleep(AFTER_ERROR_S)

    def _heard(self, event: str, value: str) -> None:
        if event == "live":
            self.live = value == "true"
            self.publish([EVERY_TOPIC])
        elif event == "hint":
            self.publish([value])

    def _refuse_at_once(self, *_args: object, **_given: object) -> NoReturn:
        raise needs_database("this operation")

    async def _refuse(self, *_args: object, **_given: object) -> NoReturn:
        self._refuse_at_once()

    migrate = ping = transact = try_unlocked = transact_on = read = _refuse
    execute_alone = execute_and_read = read_events = end_of_events = _refuse
    transact_apart = transact_on_sync = _refuse_at_once


# The engine ---------------------------------------------------------------------


class RemoteFollowing(Following):
    """Subscriptions whose pages come from the server."""

    def __init__(self, shell: Shell, engine: "RemoteEngine") -> None:
        super().__init__(shell)
        self._engine = engine

    async def next_events(self, after: str, wanted: EventFilter, *, waits: bool = True) -> ToldPage:
        with self.store.hints(EVENT_TOPICS) as hints:
            while True:
                try:
                    page = await self._engine.next_events(after, wanted, waits=False)
                except ASK_AGAIN as error:
                    if not waits:
                        raise
                    log.log(level_of(error), "could not read events; trying again: %s", error)
                    await asyncio.sleep(AFTER_ERROR_S)
                    continue
                if page.cursor != after or not waits:
                    return page
                await hints.look_out(LOOK_AGAIN_S, LOOK_AGAIN_MAX_S)

    async def end_of_log(self) -> LogEnd:
        return await self._engine.end_of_log()


class RemoteEngine(Engine):
    """Every operation of FlowFabric, through a server."""

    is_remote = True
    connection: HttpConnection
    coded: bool
    """Whether payloads go through a codec there."""

    @classmethod
    async def reach(cls, url: str, token: str | None) -> Self:
        """Connect, and ask the server for what has to be known first."""
        connection = HttpConnection(url, token)
        try:
            deployment = await connection.describe()
        except BaseException:
            await connection.close()
            raise
        engine = cls(
            RemoteStore(connection, deployment.backend),
            EngineConfig(payload_bytes_max=deployment.payload_bytes_max),
            shell.Deployment(
                partitions=PartitionConfig(
                    num_flow=deployment.num_flow_partitions,
                    num_budget=deployment.num_budget_partitions,
                    num_quota=deployment.num_quota_partitions,
                ),
                handle_key=b"",
            ),
            Values(deployment.plain_bytes_max),
        )
        engine.connection, engine.coded = connection, deployment.coded
        engine.following = RemoteFollowing(engine.shell, engine)
        return engine

    @property
    def codes_values(self) -> bool:
        return self.coded

    async def forward(self, operation: RemoteOperation, arguments: Mapping[str, object]) -> object:
        if operation.name in BY_ITSELF and not self.coded:
            (same,) = arguments.values()
            return same
        return await self.connection.call(operation, _sendable(arguments))

    def on(self, connection: object, *, sync: bool = False) -> NoReturn:
        raise needs_database(JOINING)

    async def create_checked(
        self, checked: Sequence[Checked], *, key_wait_ms: int = KEY_WAIT_MS
    ) -> list[CreateResult]:
        """Send the ids generated here, so that asking again finds what was created."""
        requests = [_request_of(each) for each in checked]
        return await self.create_executions(requests, key_wait_ms=key_wait_ms)


def _forwarded(operation: RemoteOperation) -> Callable[..., Coroutine[object, object, object]]:
    async def call(self: RemoteEngine, *args: object, **given: object) -> object:
        return await self.forward(operation, operation.bind(args, given))

    call.__name__ = operation.name
    call.__doc__ = getattr(Engine, operation.name).__doc__
    return call


def _joining(_self: RemoteEngine, *_args: object, **_given: object) -> NoReturn:
    raise needs_database(JOINING)


for _name in vars(Engine):
    if _name in OPERATIONS:
        setattr(RemoteEngine, _name, _forwarded(OPERATIONS[_name]))
    elif _name.endswith(("_on", "_on_sync")):
        setattr(RemoteEngine, _name, _joining)


def _request_of(checked: Checked) -> NewExecution:
    terms = checked.terms
    limits = {str(each.quota_policy_id): each for each in terms.limits}
    policy = parse_policy(terms.policy)
    named = {*limits, *policy.budget_ids, *(each.quota_policy_id for each in policy.quota_policies)}
    return NewExecution(
        execution_kind=terms.execution_kind,
        lane_id=terms.lane_id,
        namespace=terms.namespace,
        input_payload=checked.payload,
        payload_encoding=terms.payload_encoding,
        priority=terms.priority,
        creator_identity=terms.creator_identity,
        idempotency_key=checked.idempotency_key,
        strict=checked.strict,
        tags=terms.tags,
        policy=terms.policy,
        delay_until_ms=terms.delay_until_ms,
        delay_ms=terms.delay_ms,
        execution_deadline_at_ms=terms.deadline_at_ms,
        execution_id=checked.own_id or checked.execution_id,
        id_is_chosen=checked.id_is_chosen,
        parent_execution_id=checked.parent_execution_id,
        gates=[each for each in terms.gates if each.owner_id not in named],
        limits=[
            LimitUse(limit=limits[each.owner_id], key=each.key)
            for each in terms.gates
            if each.owner_id in limits
        ],
    )


def _sendable(arguments: Mapping[str, object]) -> dict[str, object]:
    """Requests as callers make them; a policy in bytes travels as JSON, not in base64."""
    return {name: _with_policy(value) for name, value in arguments.items()}


def _with_policy(value: object) -> object:
    if isinstance(value, Checked):
        return _request_of(value)
    if isinstance(value, NewExecution) and isinstance(value.policy, bytes):
        return structs.replace(value, policy=encode_policy(parse_policy(value.policy)))
    if isinstance(value, list | tuple):
        return [_with_policy(each) for each in value]
    return value
