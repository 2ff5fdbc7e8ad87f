"""Every error FlowFabric raises on purpose.

    FlowFabricError
    ├── NotFound            no such execution, flow, budget …                      404
    ├── Validation          the request itself is wrong                            400
    │   └── InvalidInput, PayloadTooLarge, InvalidPolicyJson, Corruption (500) …
    ├── Contention          someone else was there first, or it is not your turn   409
    │   └── LeaseConflict, ExecutionNotActive, LockTimeout, RetryExhausted (503) …
    ├── Conflict            it contradicts something that already exists           409
    │   └── IdempotencyConflict, CycleDetected, DependencyAlreadyExists …
    ├── StateConflict       the request was fine, the state was not                409
    │   └── StaleLease, LeaseExpired, LaneNotAccepting, AlreadySuspended …
    ├── Unsuccessful        the execution that was waited for did not complete     409
    │   └── ExecutionFailed, ExecutionCancelled, ExecutionExpired, ExecutionSkipped
    ├── StepsChanged        the code no longer takes the steps it has stored       409
    │   └── CodeMismatch    a call that does not fit them, refused before it ran
    ├── StepFailed          a step failed in an earlier run, its class is gone     500
    ├── DoNotRetry          raised by handlers: trying again cannot help           422
    │   └── SignalTimeout   what a handler waited for did not come in time
    ├── CodecFailed         the app's codec could not encode or decode a value     503
    ├── Bug                 the engine broke one of its own rules                  500
    ├── Transport           the database or the connection to it failed            500
    ├── AccessDenied        a server does not allow this with this token           403
    │   └── Unauthorized    it rejects the token itself                            401
    ├── Unavailable         this cannot be served here or now                      503
    │   └── SchemaTooOld, SchemaTooNew, DatabaseGone
    ├── ResourceExhausted   a bounded pool is full; come back later                429
    ├── OperationTimeout    it took longer than the caller allowed                 504
    └── HistoryChanged      the event log lost what a cursor has seen              409

Programs branch on the class (or on `code`) and read the attributes; the message
is for people. `error_class` says what to do next: only `retryable` errors may
succeed when the same call is simply repeated. The default message of an error is
the first line of its docstring.
"""

import re
from collections.abc import Sequence
from enum import StrEnum
from shlex import quote
from typing import ClassVar, Final

# The base of all errors, their classification, and how a refused value is shown

VALUE_SHOWN_MAX_CHARS: Final = 80


class ErrorClass(StrEnum):
    """What the caller should do about an error."""

    TERMINAL = "terminal"
    RETRYABLE = "retryable"
    COOPERATIVE = "cooperative"
    INFORMATIONAL = "informational"
    ADVISORY = "advisory"
    BUG = "bug"
    EXPECTED = "expected"
    SOFT_ERROR = "soft_error"


class BackendErrorKind(StrEnum):
    """What kind of fault a backend reported."""

    TRANSPORT = "transport"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    AUTH = "auth"
    CLUSTER = "cluster"
    BUSY_LOADING = "busy_loading"
    OTHER = "other"

    @property
    def retryable(self) -> bool:
        return self in (
            BackendErrorKind.TRANSPORT,
            BackendErrorKind.TIMEOUT,
            BackendErrorKind.CLUSTER,
            BackendErrorKind.BUSY_LOADING,
        )


def abbreviated(value: object) -> str:
    """`value` as it may appear in a message: at most `VALUE_SHOWN_MAX_CHARS` long."""
    if isinstance(value, str | bytes):
        value = value[: VALUE_SHOWN_MAX_CHARS + 1]
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= VALUE_SHOWN_MAX_CHARS else text[: VALUE_SHOWN_MAX_CHARS - 1] + "…"


_WORD_START: Final = re.compile(r"(?<!^)(?=[A-Z])")


class FlowFabricError(Exception):
    """Something FlowFabric refused or could not do."""

    code: ClassVar[str] = "error"
    http_status: ClassVar[int] = 500
    error_class: ErrorClass = ErrorClass.TERMINAL
    detail: str

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        error_class: ErrorClass | None = None,
        http_status: int | None = None,
    ) -> None:
        super().__init_subclass__()
        cls.code = code or _WORD_START.sub("_", cls.__name__).lower()
        if error_class is not None:
            cls.error_class = error_class
        if http_status is not None:
            cls.http_status = http_status

    def __init__(self, detail: str = "") -> None:
        self.detail = detail or (self.__doc__ or self.code).partition("\n")[0]
        super().__init__(self.detail)

    @property
    def retryable(self) -> bool:
        """Whether repeating the same call may succeed."""
        return self.error_class is ErrorClass.RETRYABLE


_NOT_GIVEN: Final = object()
REPEAT_TO_BE_SURE: Final = (
    "; it may have succeeded: repeat it with the same idempotency key to be sure"
)


class NotFound(FlowFabricError, http_status=404):
    """There is no such thing. A missing stream is expected: nothing was written yet."""

    def __init__(self, entity: str, id: str) -> None:  # noqa: A002
        super().__init__(f"{entity} not found: {id}")
        self.entity, self.id = entity, id
        if entity == "stream":
            self.error_class = ErrorClass.EXPECTED


class Bug(FlowFabricError, error_class=ErrorClass.BUG):
    """The engine broke one of its own rules. Please report it."""


class Transport(FlowFabricError):
    """The database or the connection to it failed. `kind` says whether to try again.

    `may_have_happened` says that the answer was lost: the request may have succeeded.
    """

    def __init__(
        self,
        backend: str,
        detail: str,
        *,
        kind: BackendErrorKind = BackendErrorKind.OTHER,
        may_have_happened: bool = False,
    ) -> None:
        super().__init__(
            f"transport ({backend}): {detail}{REPEAT_TO_BE_SURE if may_have_happened else ''}"
        )
        self.backend, self.kind, self.may_have_happened = backend, kind, may_have_happened
        self.error_class = ErrorClass.RETRYABLE if kind.retryable else ErrorClass.TERMINAL


class FileLocked(Transport, http_status=503):
    """Another process keeps the file of the database locked."""

    def __init__(self, detail: str) -> None:
        super().__init__("sqlite", detail, kind=BackendErrorKind.BUSY_LOADING)
        self.detail, self.args = detail, (detail,)


class AccessDenied(FlowFabricError, http_status=403):
    """The server does not allow this with this token. `reason` is the code in its answer."""

    def __init__(self, url: str, detail: str, reason: str = "") -> None:
        super().__init__(f"{url}: {detail}")
        self.url, self.reason = url, reason


class Unauthorized(AccessDenied, http_status=401):
    """The server rejects the token: it is missing, wrong, revoked or expired."""


class Unavailable(FlowFabricError, http_status=503):
    """The operation cannot be served by this process or this backend."""

    def __init__(self, op: str, detail: str = "") -> None:
        super().__init__(f"{op}: {detail}" if detail else f"{op} is unavailable")
        self.op = op


def migrating(program: str) -> str:
    """The command that migrates the database of a program."""
    return f"flowfabric migrate --app {quote(program)}"


MIGRATE_APP: Final = migrating("module:app")


class SchemaTooOld(Unavailable):
    """The database schema is older than this package needs. Run `flowfabric migrate`."""

    def __init__(self, found: int, expected: int, url: str | None = None) -> None:
        command = (
            f"run: {MIGRATE_APP} (or set FLOWFABRIC_URL, and run: flowfabric migrate)"
            if url is None
            else f"run: flowfabric migrate --url {url}"
        )
        detail = f"the database is at version {found}, this package needs {expected}; {command}"
        super().__init__("schema", detail)
        self.found, self.expected = found, expected


class SchemaTooNew(Unavailable):
    """The database was migrated by a newer package. Upgrade this one."""

    def __init__(self, found: int, expected: int) -> None:
        super().__init__(
            "schema",
            f"the database is at version {found}, this package knows only {expected};"
            " upgrade the flowfabric package",
        )
        self.found, self.expected = found, expected


class DatabaseGone(Unavailable):
    """The database file was deleted or replaced. Put it back, or restart this process."""


class ResourceExhausted(FlowFabricError, error_class=ErrorClass.RETRYABLE, http_status=429):
    """A bounded pool is full. Wait `retry_after_ms`, if given, and try again."""

    def __init__(
        self,
        pool: str,
        max: int,  # noqa: A002
        retry_after_ms: int | None = None,
    ) -> None:
        hint = "" if retry_after_ms is None else f"; retry after {retry_after_ms} ms"
        super().__init__(f"{pool}: all {max} are in use{hint}")
        self.pool, self.max, self.retry_after_ms = pool, max, retry_after_ms


class OperationTimeout(FlowFabricError, code="timeout", http_status=504):
    """The operation took longer than allowed. It may or may not have happened."""

    def __init__(self, op: str, elapsed_ms: int, why: str = "") -> None:
        took = f"{elapsed_ms} ms" if elapsed_ms < 1_000 else f"{elapsed_ms / 1_000:.1f} s"
        super().__init__(f"{op} timed out after {took}{f': {why}' if why else ''}")
        self.op, self.elapsed_ms = op, elapsed_ms


class HistoryChanged(FlowFabricError, http_status=409):
    """The event log has lost what a cursor has seen, or what came after that.

    Read on from `resume_after`.
    """

    def __init__(self, detail: str, resume_after: str) -> None:
        super().__init__(detail)
        self.resume_after = resume_after


class StepsChanged(FlowFabricError, http_status=409):
    """The code no longer accounts for the steps it has stored.

    It was changed while the execution was under way, or depends on something that
    is not recorded. Restore the steps, or submit the work again.
    """


class CodeMismatch(StepsChanged):
    """A call, or without a key the arguments of the task, does not fit what is stored."""

    def __init__(self, step_key: str | None, detail: str, advice: str | None = None) -> None:
        """`advice` says what to do if it is not to deploy other code."""
        super().__init__(detail)
        self.step_key, self.advice = step_key, advice


class StepFailed(FlowFabricError, http_status=500):
    """A step failed in an earlier run with an exception that cannot be made again."""

    def __init__(self, step_key: str, type_name: str, message: str) -> None:
        super().__init__(f"step {step_key}: {type_name}: {message}")
        self.step_key, self.type_name, self.message = step_key, type_name, message


class CodecFailed(FlowFabricError, error_class=ErrorClass.RETRYABLE, http_status=503):
    """The app's codec has raised: it could not encode a value, or decode what is stored.

    Nobody but the codec knows whether it can later, as when its key service was away.
    """

    def __init__(self, told: str, *, decoding: bool, what: str = "a value") -> None:
        super().__init__(
            f"the app's codec could not {'decode' if decoding else 'encode'} {what}: {told}"
        )
        self.told, self.decoding, self.what = told, decoding, what


class DoNotRetry(FlowFabricError, http_status=422):
    """Trying again cannot help. A handler raises it to fail for good, whatever its retries."""


class SignalTimeout(DoNotRetry, TimeoutError):
    """What the handler waited for did not come in time. Later runs of it get the same error."""


class Validation(FlowFabricError, code="validation_error", http_status=400):
    """The request itself is wrong. Repeating it cannot help."""


class InvalidInput(Validation):
    """A field of the request is missing, malformed or out of range."""

    def __init__(self, field: str, problem: str, value: object = _NOT_GIVEN) -> None:
        shown = "" if value is _NOT_GIVEN else f" (got {abbreviated(value)})"
        super().__init__(f"{field}: {problem}{shown}")
        self.field, self.problem = field, problem
        self.value = None if value is _NOT_GIVEN else value


class InvalidBlockingReason(InvalidInput):
    """An execution cannot be kept back, or let go, for that reason."""


class NotInAStep(Validation):
    """A verb was called inside the function of a step. Call it from the handler itself."""

    def __init__(self, verb: str, step_name: str) -> None:
        super().__init__(
            f"{verb} was called inside the function of step {step_name!r}: a step runs as a whole"
            " or not at all, so it cannot wait or take steps. Call it from the handler itself"
        )
        self.verb, self.step_name = verb, step_name


class NotAwaited(Validation):
    """A handler called a verb and ended without awaiting it, so the call did nothing."""

    def __init__(self, calls: Sequence[str]) -> None:
        more = f" (and {len(calls) - 1} more)" if len(calls) > 1 else ""
        super().__init__(
            f"{calls[0]}{more} was called but not awaited, so it did nothing; write `await`"
            " before it"
        )
        self.calls = tuple(calls)


class PayloadTooLarge(Validation):
    """A payload exceeds its limit. Store it elsewhere and pass a reference."""

    def __init__(self, field: str, limit_bytes: int, actual_bytes: int) -> None:
        super().__init__(f"{field}: {actual_bytes} bytes, at most {limit_bytes} allowed")
        self.field, self.limit_bytes, self.actual_bytes = field, limit_bytes, actual_bytes


class NotStorable(Validation):
    """The database cannot hold a value of the request. Repeating it cannot help."""

    def __init__(self, backend: str, detail: str) -> None:
        super().__init__(f"{backend} cannot store a value of this request: {detail}")
        self.backend = backend


class CapabilityMismatch(Validation):
    """The worker lacks capabilities this execution requires. Ask for other work."""

    def __init__(self, missing: tuple[str, ...]) -> None:
        super().__init__(",".join(missing))
        self.missing = missing


# From here on the kinds of each family read like a table, two lines apiece.
# fmt: off

class InvalidCapabilities(Validation):
    """A capability list is malformed; the detail names the rule it breaks."""
class InvalidPolicyJson(Validation):
    """The execution policy is malformed; the detail names the field."""
class InvalidQuotaSpec(Validation):
    """A limit sets no limit, or its parts contradict each other; the detail names the part."""
class SignalLimitExceeded(Validation):
    """The execution has accepted its maximum number of signals."""
class KeptSignalsFull(Validation):
    """The execution keeps its maximum of signals for later waits. Send this one when it waits."""
class WrongSignalName(Validation):
    """The waitpoint, and so its token, only takes signals of its own name."""
class InvalidWaitpointKey(Validation):
    """The waitpoint key is malformed or belongs to another waitpoint."""
class InvalidToken(Validation):
    """The waitpoint token is malformed, for something else, or not signed by one of our keys."""
class MissingToken(InvalidToken):
    """No waitpoint token was presented. Send the one that was handed out."""
class TokenExpired(InvalidToken):
    """The key that signed the waitpoint token is past its grace. Ask for a new token."""
class RetentionLimitExceeded(Validation):
    """A frame, or a summary, is larger than a stream keeps. Send less, or a reference."""
class InvalidLeaseForSuspend(Validation):
    """The suspension was asked for by an attempt that is not the current one."""
class InvalidDependency(Validation):
    """The dependency names executions that cannot depend on each other."""
class InvalidWaitpointForExecution(Validation):
    """The waitpoint belongs to another execution or attempt."""
class InvalidKid(Validation):
    """A key id must be non-empty and contain no colon."""
class InvalidSecretHex(Validation):
    """A secret must be a non-empty, even number of hexadecimal digits."""
class InvalidGraceMs(Validation):
    """A grace period must be a non-negative whole number of milliseconds."""
class Corruption(Validation, http_status=500):
    """Stored or presented bytes do not decode. Do not retry; look at the data."""
class InvalidBudgetScope(Validation):
    """A budget's scope is unknown or names nothing; the detail says which."""
class InvalidHandle(Validation):
    """The handle does not decode, or was not issued by this database. Use one that was."""
class HandleFromOtherBackend(Validation):
    """The handle was issued by another backend. Use the engine that issued it."""


class Contention(FlowFabricError, error_class=ErrorClass.RETRYABLE, http_status=409):
    """Someone else was there first, or it is not your turn. Try again."""

class UseClaimResumedExecution(Contention):
    """The execution was suspended before; claim it through the resume path."""
class NotAResumedExecution(Contention):
    """The execution was never suspended; claim it the ordinary way."""
class ExecutionNotLeaseable(Contention):
    """The execution is not in a state in which it can be claimed."""
class LeaseConflict(Contention):
    """Another worker holds the lease."""
class InvalidClaimGrant(Contention):
    """The claim grant does not exist or was issued to another worker."""
class RateLimitExceeded(Contention, http_status=429):
    """The rate limit is reached. Try again when the window has moved on."""
class ConcurrencyLimitExceeded(Contention, http_status=429):
    """The concurrency limit is reached. Try again when one run has ended."""
class LanePaused(Contention):
    """The lane is paused or disabled and hands out no work. Resume it."""
class ClaimGrantExpired(Contention):
    """The claim grant was not used in time. Ask for a new one."""
class WaitpointNotFound(Contention):
    """There is no such waitpoint yet."""
class StaleGraphRevision(Contention):
    """The flow's graph changed meanwhile. Read its revision and try again."""

class ExecutionNotActive(Contention, error_class=ErrorClass.TERMINAL):
    """The execution is not running, so its worker cannot act on it. Stop working on it."""

    def __init__(
        self,
        execution_id: str,
        *,
        lifecycle_phase: str,
        terminal_outcome: str,
        lease_epoch: int,
        attempt_id: str | None,
        reason: str = "",
    ) -> None:
        super().__init__(
            f"execution {execution_id} is {lifecycle_phase}"
            f" (outcome {terminal_outcome}, lease epoch {lease_epoch})"
        )
        self.execution_id, self.reason = execution_id, reason
        self.lifecycle_phase, self.terminal_outcome = lifecycle_phase, terminal_outcome
        self.lease_epoch = lease_epoch
        self.attempt_id = attempt_id

class ExecutionNotEligible(Contention, error_class=ErrorClass.INFORMATIONAL):
    """The execution is not waiting to be claimed."""
class NoActiveLease(Contention, error_class=ErrorClass.INFORMATIONAL):
    """The execution has no lease at all."""
class RetryExhausted(Contention, http_status=503):
    """The transaction kept colliding with others. Try again later."""
class LockTimeout(RetryExhausted):
    """Another transaction holds a lock on a row this one needs, such as a key it inserted."""
class KeyUndecided(Contention):
    """Another open transaction is deciding the same idempotency key or id. Try again."""

class Conflict(FlowFabricError, http_status=409):
    """The request contradicts something that already exists."""

class IdempotencyConflict(Conflict):
    """The idempotency key was used before with a different request."""

class DependencyAlreadyExists(Conflict):
    """The edge exists already, with different properties; `existing` is that edge."""

    def __init__(self, detail: str, existing: object = None) -> None:
        super().__init__(detail)
        self.existing = existing

class CycleDetected(Conflict):
    """The edge would close a cycle."""
class SelfReferencingEdge(Conflict):
    """An execution cannot depend on itself."""
class BudgetExists(Conflict):
    """The budget exists already, under other terms. Change them with update_budget."""
class ExecutionAlreadyInFlow(Conflict):
    """The execution belongs to a flow already."""
class WaitpointAlreadyExists(Conflict, error_class=ErrorClass.INFORMATIONAL):
    """The waitpoint exists already."""
class RotationConflict(Conflict):
    """The key id is in use with a different secret. Choose another one."""
class ActiveAttemptExists(Conflict, error_class=ErrorClass.BUG):
    """A second attempt was opened while one was running."""


class StateConflict(FlowFabricError, http_status=409):
    """The request was fine, the state was not."""

class LaneNotAccepting(StateConflict):
    """The lane is draining or disabled and takes no new work."""
class StaleLease(StateConflict):
    """Another lease has been granted since. Stop working on the execution."""
class LeaseExpired(StateConflict):
    """The lease ran out before it was renewed. Stop working on the execution."""
class LeaseRevoked(StateConflict):
    """An operator took the lease away. Stop working on the execution."""
class TargetNotSignalable(StateConflict):
    """The execution cannot take signals any more, or not yet."""
class ExecutionNotTerminal(StateConflict):
    """The execution has not ended yet."""
class MaxReplaysExhausted(StateConflict):
    """The execution was replayed as often as its policy allows."""
class StreamClosed(StateConflict):
    """The attempt has ended or is paused; nothing can be appended to its stream."""
class StaleOwnerCannotAppend(StateConflict):
    """Only the current owner may append to the stream. Stop working on the execution."""
class ExecutionNotInFlow(StateConflict):
    """The execution is not a member of the flow."""
class FlowAlreadyTerminal(StateConflict):
    """The flow has ended."""
class Terminal(StateConflict):
    """The execution has ended."""


class BudgetExceeded(StateConflict, error_class=ErrorClass.COOPERATIVE):
    """A budget's hard limit leaves no room. Nothing was counted; wait for its reset or use less.

    A handler may catch it.
    """

    def __init__(
        self,
        detail: str = "",
        *,
        budget: str = "",
        dimension: str = "",
        used: int = 0,
        reserved: int = 0,
        limit: int = 0,
    ) -> None:
        super().__init__(detail)
        self.budget, self.dimension = budget, dimension
        self.used, self.reserved, self.limit = used, reserved, limit


class _Informational(StateConflict, error_class=ErrorClass.INFORMATIONAL):
    """Nothing was lost by this; note it and carry on."""

class ExecutionNotSuspended(_Informational):
    """The execution is not suspended."""
class AlreadySuspended(_Informational):
    """The execution is suspended already."""
class WaitpointClosed(_Informational):
    """The waitpoint takes no more signals."""
class WaitpointNotOpen(_Informational):
    """The waitpoint is not open."""
class WaitpointNotPending(_Informational):
    """The waitpoint is active or closed, not pending."""
class PendingWaitpointExpired(_Informational):
    """The pending waitpoint was not used in time."""
class GrantAlreadyExists(_Informational):
    """A claim grant is outstanding."""


class Unsuccessful(FlowFabricError, http_status=409):
    """The execution that was waited for ended without a result."""

    def __init__(self, execution_id: str, reason: str = "") -> None:
        ended = (self.__doc__ or "").partition("\n")[0].removesuffix(".")
        super().__init__(f"{execution_id}: {reason or ended}")
        self.execution_id, self.reason = execution_id, reason

class ExecutionFailed(Unsuccessful):
    """The execution failed and is not tried again."""
class ExecutionCancelled(Unsuccessful):
    """The execution was cancelled."""
class ExecutionExpired(Unsuccessful):
    """The execution ran out of time."""
class ExecutionSkipped(Unsuccessful):
    """The execution was skipped because something it depends on did not complete."""
