"""Failures: how a handler's exception is reported, stored, and made again for later runs.

1. Later runs get the same exception: of the same class, with the same arguments, text and
   attributes. Storing it tries whether it can be made again.
2. If not, because it holds something other than plain values or its class cannot be
   instantiated, they get a stand-in: an instance of a class derived from it on the spot, with
   its text and its plain attributes. Reading any other attribute explains why it is missing.
3. If its class cannot be imported, because it was defined inside a function or is gone, or
   cannot be derived from, they get `StepFailed`.

So `except ValueError` works in every run. Nothing here raises, whatever the exception does.
"""

import ast
import asyncio
import concurrent.futures
import importlib
import traceback
import types
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Literal, NoReturn

import msgspec
from msgspec import Struct, structs

from flowfabric import errors
from flowfabric.core.bounds import FAILURE_BYTES_MAX, NAME_BYTES_MAX, TRACEBACK_BYTES_MAX
from flowfabric.core.checks import shorten
from flowfabric.core.ids import ExecutionId
from flowfabric.core.journal import MadeCall, StoredCall, shown
from flowfabric.core.records import Step, StepKind
from flowfabric.core.states import FailureClass, PublicState, TerminalOutcome
from flowfabric.engine.details import Outcome
from flowfabric.task import Retry, Task

# How a failure is reported: its class, its text, and where it comes from


class ReportedFailure(Struct, frozen=True, array_like=True):
    """The outcome of a task in another process: a result, or a failure."""

    result: bytes | None = None
    reason: str = ""
    failure_class: FailureClass = FailureClass.TRANSIENT
    category: str = ""
    trace: str = ""
    pickled: bytes | None = None
    """The exception, if it can be rebuilt."""


class ProcessDied(Exception):
    """A task's process ended before the task did."""


class RaisedElsewhere(Exception):
    """The exception that a task raised in its process: its text, and where it came from."""

    def __init__(self, failure: ReportedFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure

    def __str__(self) -> str:
        return f"{self.failure.reason}\n{self.failure.trace}".rstrip()


def elsewhere(error: BaseException) -> RaisedElsewhere | None:
    """How the exception looked where it was raised, if that was in another process."""
    origin = error if isinstance(error, RaisedElsewhere) else error.__cause__
    return origin if isinstance(origin, RaisedElsewhere) else None


def report_of(error: BaseException, task: Task[..., object] | None = None) -> ReportedFailure:
    """An exception as it is reported: as its own process saw it, if it was raised in another."""
    origin = elsewhere(error)
    if origin is not None:
        return origin.failure
    return ReportedFailure(
        reason=_reason(error),
        failure_class=_failure_class(error, task),
        category=_category(error),
        trace=_own_traceback(error),
    )


def _failure_class(error: BaseException, task: Task[..., object] | None) -> FailureClass:
    """Whether trying again may help."""
    retry = (None if task is None else task.settings.retry) or Retry()
    if isinstance(error, (errors.DoNotRetry, errors.StepsChanged, errors.Validation, *retry.final)):
        return FailureClass.PERMANENT
    return FailureClass.INFRA_CRASH if isinstance(error, ProcessDied) else FailureClass.TRANSIENT


def _category(error: BaseException) -> str:
    named = error.code if isinstance(error, errors.FlowFabricError) else type(error).__name__
    return shorten(named, NAME_BYTES_MAX)


def _reason(error: BaseException) -> str:
    """The exception in one line, and where the handler raised it."""
    if isinstance(error, errors.FlowFabricError | ProcessDied):
        return text_of(error)
    frames = traceback.extract_tb(theirs(error) or error.__traceback__)
    where = f" (in {frames[-1].name}, {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {text_of(error)}{where}"


def why_lost(error: errors.FlowFabricError) -> str:
    """Why a handler must stop: how its execution ended, if it did."""
    if isinstance(error, errors.ExecutionNotActive):
        outcome = error.terminal_outcome
        if outcome != TerminalOutcome.NONE:
            return f"{outcome}: {error.reason}" if error.reason else outcome
    return str(error)


def text_of(error: BaseException) -> str:
    """The exception's text; its `__str__` is the user's and may fail as well."""
    try:
        return str(error)
    except Exception as failure:
        return f"<its text cannot be had: {type(failure).__name__}>"


# The traceback of a handler's exception: where in the program it happened

OURS: Final = (str(Path(__file__).parent.parent), str(Path(concurrent.futures.__file__).parent))
"""Files between the worker and a handler, of no interest to its author."""
CALLS: Final = str(Path(__file__).with_name("functions.py"))
"""Where functions of the program are called: an error raised there, such as a `TypeError`
about the arguments, is attributed to the line that passed them."""
LOOP: Final = str(Path(asyncio.__file__).parent)
FRAMES_MAX: Final = 5
CHAIN_MAX: Final = 20
"""How many exceptions of a chain of causes are reported."""


def theirs(error: BaseException) -> TracebackType | None:
    """The traceback through the lines of the program; None if there are none.

    Our own frames are omitted, except the last ones if our code failed unexpectedly.
    """
    frames: list[TracebackType] = []
    frame = error.__traceback__
    while frame is not None:
        frames.append(frame)
        frame = frame.tb_next
    files = [each.tb_frame.f_code.co_filename for each in frames]
    last = max((n for n, name in enumerate(files) if not name.startswith(OURS)), default=None)
    if last is None:
        return None
    expected = (
        isinstance(error, errors.FlowFabricError)
        or files[-1].startswith(CALLS)
        or frames[-1].tb_frame.f_code is raise_again.__code__
    )
    end = last + 1 if expected else len(frames)
    made: TracebackType | None = None
    for n in reversed(range(end)):
        if n > last or not files[n].startswith(OURS):
            each = frames[n]
            made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made


def forget_ours(error: BaseException) -> None:
    """Remove our own frames from its causes, which a log prints as well."""
    each, count = error.__cause__ or error.__context__, 0
    while each is not None and count < CHAIN_MAX:
        each.__traceback__ = theirs(each) or each.__traceback__
        each, count = each.__cause__ or each.__context__, count + 1


def _own_traceback(error: BaseException) -> str:
    """The traceback as Python prints it, without our own frames before the program's.

    Empty if the exception passed no line of the program.
    """
    where = theirs(error)
    if where is None:
        return ""
    shown = traceback.TracebackException(type(error), error, where)
    each, count = shown, 1
    while (cause := each.__cause__ or each.__context__) is not None:
        if count == CHAIN_MAX:
            each.__cause__ = each.__context__ = None
            break
        each, count = cause, count + 1
        own = [frame for frame in each.stack if not frame.filename.startswith(OURS)]
        each.stack = traceback.StackSummary.from_list(own or each.stack)
    return "".join(shown.format()).rstrip()


def place_of(frame: FrameType) -> str:
    """What the program is doing on an event loop: its own calls, in one line, and the last one's.

    Frames of the loop and of this package are omitted.
    """
    stack = traceback.extract_stack(frame)
    begin = max((n for n, each in enumerate(stack) if each.filename.startswith(LOOP)), default=-1)
    own = [each for each in stack[begin + 1 :] if not each.filename.startswith(OURS)] or stack[-1:]
    shown = [f"{each.name}, {each.filename}:{each.lineno}" for each in own]
    if len(shown) > FRAMES_MAX:
        shown = [*shown[:2], "…", *shown[2 - FRAMES_MAX :]]
    return " → ".join(shown) + (f": {own[-1].line}" if own[-1].line else "")


# Classes of exceptions that stand in for one that cannot be made again ------

STOOD_IN_FOR: Final = "__flowfabric_failure__"
"""The stored failure behind a stand-in, which is stored again if the stand-in is."""
_TEXT: Final = "__flowfabric_text__"


class StandIn:
    """Attributes a stand-in has before those of its class, whose code never runs."""

    __slots__ = ()

    def __init_subclass__(cls, **_: object) -> None:
        """Do not run the class's own hook, which may register its subclasses."""

    def __str__(self) -> str:
        return str(getattr(type(self), _TEXT))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __getattr__(self, name: str) -> NoReturn:
        """The class may compute missing attributes from something that is not stored."""
        raise AttributeError(
            f"this {type(self).__name__} has no {name}: it comes from an earlier run, of which only"
            " plain values are stored. Use it inside the step, and raise what you need of it"
        )


class Lost:
    """In place of an attribute that is not stored: leads to `StandIn.__getattr__`."""

    def __get__(self, error: object, kind: type) -> NoReturn:
        raise AttributeError


# Plain values as text, from which exactly the same can be read again --------

LITERAL_BYTES_MAX: Final = 8 * 1024
_SCALARS: Final = (type(None), bool, int, float, str, bytes)


def literal(value: object) -> str | None:
    """The text; None for a value that is not plain, or too long."""
    try:
        if not _is_plain(value):
            return None
        text = ascii(value)
        # A number may be too long to be read, or not a number.
        if len(text) > LITERAL_BYTES_MAX or ast.literal_eval(text) != value:
            return None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return text


def _is_plain(value: object) -> bool:
    """Exactly of these types: an enum is text too, but would not come back as an enum."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if isinstance(value, list | tuple) and kind in (list, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict) and kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return False


GIVEN_UP: Final = b'"given up"'
"""Stored for a call that the handler cancelled: later runs wait there until they cancel it too."""
MARK: Final = "__flowfabric_step__"
"""The attribute of an exception that names the step it came out of; see `worker.blame`."""
MESSAGE_BYTES_MAX: Final = 8 * 1024
ATTRIBUTES_MAX: Final = 50
MEMBERS_MAX: Final = 20
"""Exceptions of a group."""
DEPTH_MAX: Final = 3
"""Groups inside each other."""

_NOTES: Final = "__notes__"
_FIELDS: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)

How = Literal["bare", "called", "stand-in"]
"""How to make it: without its constructor, as Python copies it, or not at all."""


class StoredFailure(Struct, frozen=True, kw_only=True, omit_defaults=True):
    module: str
    name: str
    message: str
    traceback: str = ""
    args: str | None = None
    """None if they were not plain values."""
    attributes: dict[str, str] = {}
    lost: list[str] = []
    """Attributes that were not plain values."""
    members: list["StoredFailure"] | None = None
    """Of a group of exceptions."""
    how: How = "stand-in"
    maker: str = ""
    """The method of its class that copies it; if empty, the class itself."""
    maker_args: str = "()"


def encode_failure(error: BaseException) -> bytes:
    try:
        stored = _stored(error, DEPTH_MAX)
    except Exception:
        # Its class is the user's, and may do anything.
        stored = _in_words(error)
    where = shorten(_traceback(error), TRACEBACK_BYTES_MAX)
    made = msgspec.json.encode(structs.replace(stored, traceback=where))
    return made if len(made) <= FAILURE_BYTES_MAX else msgspec.json.encode(_in_words(error))


def _in_words(error: BaseException) -> StoredFailure:
    name = shorten(str(type(error).__name__), NAME_BYTES_MAX)
    return StoredFailure(module="", name=name, message=_message(error))


def rebuilt(step_key: str, data: bytes) -> BaseException:
    """The exception a stored failure stands for."""
    stored = msgspec.json.decode(data, type=StoredFailure)
    made = _again(stored)
    if made is None:
        return errors.StepFailed(step_key, stored.name, stored.message)
    with suppress(Exception):
        note = f"stored by an earlier run, as the failure of step {step_key}"
        _set(made, _NOTES, [*getattr(made, _NOTES, ()), note])
    return made


def raise_again(step_key: str, data: bytes) -> NoReturn:
    """The same, raised: it comes from the call of the program, not from here."""
    raise rebuilt(step_key, data)


# Storing


def _stored(error: BaseException, depth: int) -> StoredFailure:
    kind = type(error)
    stood_in_for: object = getattr(kind, STOOD_IN_FOR, None)
    if isinstance(stood_in_for, StoredFailure):
        return stood_in_for
    stored = StoredFailure(
        module=shorten(str(kind.__module__), NAME_BYTES_MAX),
        name=shorten(kind.__qualname__, NAME_BYTES_MAX),
        message=_message(error),
    )
    if _find(stored.module, stored.name) is not kind:
        return structs.replace(stored, module="")
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions
        if depth == 0 or len(members) > MEMBERS_MAX:
            return structs.replace(stored, module="")
        inner = [_stored(each, depth - 1) for each in members]
        stored = structs.replace(stored, members=inner)
    held = _attributes(error)
    plain = {name: literal(value) for name, value in held.items()}
    maker, maker_args = _recipe(error)
    stored = structs.replace(
        stored,
        args=literal((error.message,) if isinstance(error, BaseExceptionGroup) else error.args),
        attributes={name: text for name, text in plain.items() if text is not None},
        lost=[name for name, text in plain.items() if text is None],
        maker=maker,
        maker_args=maker_args or "()",
    )
    ways: tuple[How, ...] = ("bare", "called") if maker_args is not None else ("bare",)
    for how in ways:
        tried = structs.replace(stored, how=how)
        if _is_same(_made(kind, tried), error):
            return tried
    return stored


def _recipe(error: BaseException) -> tuple[str, str | None]:
    """How Python would copy it: by which method, or by its class, and with which arguments."""
    try:
        reduced: object = error.__reduce__()
        if not isinstance(reduced, tuple):
            return "", None
        maker, args = reduced[:2]
        kind = type(error)
        if maker is kind:
            return "", literal(args)
        if getattr(maker, "__self__", None) is kind:
            return str(maker.__name__), literal(args)
    except Exception:
        return "", None
    return "", None


def _attributes(error: BaseException) -> dict[str, object]:
    """All attributes of an exception besides its arguments: set on it, in slots, or in C."""
    held: dict[str, object] = {}
    for kind in type(error).__mro__:
        if kind in (BaseExceptionGroup, BaseException):
            break
        for name, field in vars(kind).items():
            if isinstance(field, _FIELDS) and not name.startswith("__"):
                try:
                    held.setdefault(name, getattr(error, name))
                except AttributeError:
                    continue
    held.update(vars(error))
    held.pop(MARK, None)
    return dict(list(held.items())[:ATTRIBUTES_MAX])


def _is_same(made: BaseException | None, error: BaseException) -> bool:
    if made is None or type(made) is not type(error):
        return False
    try:
        if isinstance(made, BaseExceptionGroup) and isinstance(error, BaseExceptionGroup):
            inner = zip(made.exceptions, error.exceptions, strict=True)
            if not all(_is_same(*both) for both in inner):
                return False
        elif not _equal(made.args, error.args):
            return False
        ours, theirs = _attributes(made), _attributes(error)
        alike = ours.keys() == theirs.keys()
        return (
            alike
            and all(_equal(ours[name], theirs[name]) for name in ours)
            and str(made) == str(error)
        )
    except Exception:
        return False


def _equal(one: object, other: object) -> bool:
    """Equal, and of the same types: an enum may equal its text."""
    if type(one) is not type(other):
        return False
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(_equal, one.values(), other.values()))
    return bool(one == other)


# Making


def _again(stored: StoredFailure) -> BaseException | None:
    kind = _find(stored.module, stored.name)
    if kind is None:
        return None
    made = _made(kind, stored)
    # The class may have changed since.
    if made is not None and type(made) is kind and _message(made) == stored.message:
        return made
    return _stand_in(kind, stored)


def _made(kind: type[BaseException], stored: StoredFailure) -> BaseException | None:
    if stored.how == "stand-in":
        return None
    try:
        if stored.how == "bare":
            made = _bare(kind, stored)
        else:
            maker: Callable[..., object] = getattr(kind, stored.maker) if stored.maker else kind
            made = _exception(maker(*ast.literal_eval(stored.maker_args)))
            if stored.args is not None:
                _set(made, "args", ast.literal_eval(stored.args))
        for name, text in stored.attributes.items():
            value: object = ast.literal_eval(text)
            # Attributes that the constructor sets or computes may be read-only.
            if not _holds(made, name, value):
                _set(made, name, value)
    except Exception:
        return None
    return made


def _holds(made: BaseException, name: str, value: object) -> bool:
    held = _attributes(made)
    return name in held and _equal(held[name], value)


def _bare(kind: type[BaseException], stored: StoredFailure) -> BaseException:
    """An instance made without running its constructor or any other code of its class."""
    (new, *_) = (
        vars(base)["__new__"]
        for base in kind.__mro__
        if isinstance(vars(base).get("__new__"), types.BuiltinFunctionType)
    )
    args = (stored.message,) if stored.args is None else ast.literal_eval(stored.args)
    if stored.members is None:
        made = _exception(new(kind))
        _set(made, "args", args)
        return made
    inner = [
        _again(each) or errors.StepFailed("", each.name, each.message) for each in stored.members
    ]
    return _exception(new(kind, *args, inner))


def _stand_in(kind: type[BaseException], stored: StoredFailure) -> BaseException | None:
    """An instance of a class of the same name, derived from it, with the stored text."""
    try:
        held: dict[str, object] = dict.fromkeys(stored.lost, Lost())
        held.update({name: ast.literal_eval(text) for name, text in stored.attributes.items()})
        body = {name: value for name, value in held.items() if not name.startswith("__")} | {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            _TEXT: stored.message,
            STOOD_IN_FOR: stored,
        }
        derived = types.new_class(
            kind.__name__, (StandIn, kind), exec_body=lambda own: own.update(body)
        )
        assert issubclass(derived, BaseException)
        made = _bare(derived, stored)
        if _NOTES in held:
            _set(made, _NOTES, held[_NOTES])
    except Exception:
        return None
    return made


def _find(module: str, name: str) -> type[BaseException] | None:
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:
        return None
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _exception(made: object) -> BaseException:
    assert isinstance(made, BaseException)
    return made


def _set(error: BaseException, name: str, value: object) -> None:
    """Set an attribute although the class may forbid it."""
    BaseException.__setattr__(error, name, value)


def _message(error: BaseException) -> str:
    return shorten(text_of(error), MESSAGE_BYTES_MAX)


def _traceback(error: BaseException) -> str:
    try:
        origin = elsewhere(error)
        trace = _own_traceback(error) if origin is None else origin.failure.trace
        return trace or "".join(traceback.format_exception(error))
    except Exception as failure:
        return f"<its traceback cannot be had: {type(failure).__name__}>"


# How a child ended, as its parent has seen it and stores it -----------------

RESULT_OF: Final = "result of "
"""Before the id of the child, in the name of the step."""


class ChildEnd(Struct, frozen=True):
    """How it ended without a result."""

    public_state: PublicState
    reason: str


def failure_of(outcome: Outcome) -> bytes | None:
    """What is stored beside the result."""
    if outcome.public_state is PublicState.COMPLETED:
        return None
    return msgspec.json.encode(ChildEnd(outcome.public_state, outcome.reason))


def is_end(failure: bytes) -> bool:
    """Whether this is the end of a child; otherwise the parent's question was refused."""
    try:
        msgspec.json.decode(failure, type=ChildEnd)
    except msgspec.ValidationError:
        return False
    return True


def stored_outcome(execution_id: ExecutionId, stored: Step) -> Outcome:
    end = ChildEnd(PublicState.COMPLETED, "")
    if stored.failure is not None:
        end = msgspec.json.decode(stored.failure, type=ChildEnd)
    return Outcome(
        execution_id=execution_id,
        public_state=end.public_state,
        result=stored.result,
        reason=end.reason,
    )


def ends_in(steps: Iterable[Step]) -> dict[str, Outcome]:
    """How children ended whose end a run has seen, by the names of their steps."""
    ends: dict[str, Outcome] = {}
    for step in steps:
        if step.kind is StepKind.CHILD and (step.failure is None or is_end(step.failure)):
            execution_id = ExecutionId(step.name.removeprefix(RESULT_OF))
            ends.setdefault(step.name, stored_outcome(execution_id, step))
    return ends


class Children:
    """The children of one run, and the calls that have submitted them."""

    def __init__(self) -> None:
        self._calls: dict[str, str] = {}

    def may_submit(self, child: str) -> bool:
        """Whether no other call has submitted it, neither in this run nor stored."""
        is_free = child not in self._calls
        self._calls.setdefault(child, "")
        return is_free

    def submitted(self, child: bytes, call: MadeCall | StoredCall) -> None:
        """`child` is its id as it is stored."""
        self._calls[msgspec.json.decode(child, type=str)] = shown(call)

    def told(self, refusal: str) -> str:
        """A refusal that names children by their calls, since ids mean nothing to people."""
        for child, call in self._calls.items():
            refusal = refusal.replace(f"'{RESULT_OF}{child}'", f"the result of {call}")
        return refusal
