"""Options that commands share: which database, which executions; and exit statuses."""

import asyncio
import getpass
import importlib
import os
import sys
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path, PurePath
from shlex import quote
from typing import Concatenate, Final, Literal, ParamSpec, TypeVar
from urllib.parse import unquote

import click
import msgspec
from click.core import ParameterSource
from msgspec import Struct
from rich.text import Text

from flowfabric import errors
from flowfabric.app import DEFAULT_NAMESPACE, App
from flowfabric.cli.screen import err
from flowfabric.connection import TOKEN_VARIABLE, connect
from flowfabric.core.checks import closest, visible
from flowfabric.core.diagnosis import PROGRAM, WORKER_COMMAND, Cause, Explanation
from flowfabric.core.ids import ExecutionId, parse_namespace
from flowfabric.core.policies import duration_ms
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.core.views import ExecutionSnapshot
from flowfabric.engine.engine import Engine
from flowfabric.engine.reads import ExecutionFilter
from flowfabric.parts import check_execution_in
from flowfabric.store.urls import HTTP, SQLITE, redact

# Which database a command works on, and the options every command shares

P = ParamSpec("P")
T = TypeVar("T")

URL_VARIABLE: Final = "FLOWFABRIC_URL"
APP_VARIABLE: Final = "FLOWFABRIC_APP"
IMPORTED: Final[list[str]] = []
"""The programs that this command has imported."""
IMPORT_PATIENCE_S: Final = 5.0
OURS: Final = str(Path(__file__).parent.parent) + os.sep
IMPORTING: Final = ("<frozen importlib", os.path.dirname(importlib.__file__))
NEEDED: Final = (
    "which database? Give --url sqlite:///path.db or --url postgresql://…, set"
    f" {URL_VARIABLE}, or name an app: --app module:app"
)


class Target(Struct, frozen=True, kw_only=True):
    url: str | None
    app: str | None
    """The program whose database is meant; None when the database is named itself."""
    json: bool
    namespace: str | None = None
    """As given; see `scope`."""

    def database(self) -> str:
        """The URL given, or that of the app given."""
        if self.url is not None:
            return self.url
        if self.app is not None:
            return find_app(self.app).url
        raise click.UsageError(NEEDED)

    def check_is_database(self, why: str) -> None:
        """Refuse a server: this needs the database itself."""
        url = self.database()
        if url.startswith(HTTP):
            raise errors.InvalidInput("--url", f"must be the database: {why}", redact(url))

    def scope(self) -> str | None:
        """The namespace of the command: as given, or that of the app; None for all."""
        if self.namespace is not None or self.app is None:
            return self.namespace
        return find_app(self.app).namespace

    def own_namespace(self) -> str:
        """The one namespace of something that each namespace may have under the same name."""
        return self.scope() or DEFAULT_NAMESPACE

    def naming_program(self, advice: str) -> str:
        """Advice to start a worker, with the program by its name if that is known."""
        program = self.app or os.environ.get(APP_VARIABLE)
        command = WORKER_COMMAND.replace(PROGRAM, quote(program or PROGRAM))
        return advice.replace(WORKER_COMMAND, command)

    def sentence(self, why: Explanation) -> str:
        """Why something waits, with the program by its name if that is known."""
        kind = why.detail.get("execution_kind")
        if why.cause is Cause.NO_WORKER and self.app is not None and isinstance(kind, str):
            app = find_app(self.app)
            if kind not in app.tasks:
                meant = closest(kind, sorted(app.tasks))
                known = f"; did you mean {meant!r}?" if meant else "."
                return f"{why.sentence} {self.app} has no task {kind!r}{known}"
        return self.naming_program(why.sentence)

    def tell_obstacle(self, _called: str, why: Explanation) -> None:
        """What only people can change, while a command waits."""
        err().print(Text(visible(self.sentence(why)), style="yellow"))

    async def find(self, engine: Engine, text: str) -> ExecutionId:
        """The execution that an id, or a part of one, means within the scope."""
        scope = self.scope()
        found = await engine.resolve_execution_id(text, namespace=scope)
        if scope is not None:
            await check_execution_in(scope, engine, found, called=text)
        return found

    async def open(self) -> Engine:
        """Connect to a database that exists."""
        url = self.database()
        check_file(url)
        try:
            codec = None if self.app is None else find_app(self.app).codec
            return await connect(url, set_up=False, codec=codec)
        except errors.AccessDenied as error:
            message = f"{error}; the token is taken from {TOKEN_VARIABLE}"
            raise type(error)(url, message.removeprefix(f"{url}: "), error.reason) from error
        except errors.Transport as error:
            problem = error.detail.removeprefix(f"transport ({error.backend}): ")
            raise errors.Unavailable(redact(url), f"cannot be reached: {problem}") from error


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
limit_option = click.option(
    "--limit",
    "-n",
    default=50,
    show_default=True,
    type=click.IntRange(1, 1_000_000),
    help="At most this many.",
)


def target_options(command: Callable[Concatenate[Target, P], T]) -> Callable[P, T]:
    """Adds --url, --app and --json; the command gets a `Target` as its first argument."""

    @click.option("--url", envvar=URL_VARIABLE, metavar="URL", help="The database.")
    @click.option(
        "--app",
        envvar=APP_VARIABLE,
        metavar="MODULE:APP",
        help="A program whose database to use.",
    )
    @json_option
    @click.pass_context
    @wraps(command)
    def wrapped(context: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = dict(kwargs)
        url, app = _text(given.pop("url", None)), _text(given.pop("app", None))
        if url is not None and app is not None:
            # Options beat environment variables; otherwise the URL beats the app.
            if _typed(context, "app") and not _typed(context, "url"):
                url = None
            else:
                app = None
        target = Target(
            url=url,
            app=app,
            json=bool(given.pop("as_json", False)),
            namespace=_namespace(given.pop("namespace", None)),
        )
        return context.invoke(command, target, *args, **given)

    return wrapped


def _typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def on_engine(
    namespace: Literal["any", "own"] | None = None,
) -> Callable[[Callable[Concatenate[Engine, Target, P], Awaitable[T]]], Callable[P, T]]:
    """Makes a coroutine a command that runs with an open engine, and adds `target_options` and
    --namespace. `any` is for commands about whatever exists, `own` for those about one thing that
    each namespace may have under the same name."""

    def decorate(
        command: Callable[Concatenate[Engine, Target, P], Awaitable[T]],
    ) -> Callable[P, T]:
        @wraps(command)
        def wrapped(target: Target, /, *args: P.args, **kwargs: P.kwargs) -> T:
            async def run() -> T:
                async with await target.open() as engine:
                    return await command(engine, target, *args, **kwargs)

            return asyncio.run(run())

        made = target_options(wrapped)
        if namespace is None:
            return made
        otherwise = "all" if namespace == "any" else "`default`"
        help_text = f"In this namespace.  [default: that of the app, or {otherwise}]"
        return click.option("--namespace", help=help_text)(made)

    return decorate


def user() -> str:
    """The user who typed the command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "cli"


def check_file(url: str) -> None:
    """Refuse a missing file: a mistyped path would leave an empty database behind."""
    path = unquote(url.removeprefix(SQLITE))
    if url.startswith(SQLITE) and path != ":memory:" and not Path(path).exists():
        raise errors.Unavailable(
            "sqlite",
            f"there is no database at {path}; to create it, run: flowfabric migrate --url"
            f" {quote(url)}",
        )


class BrokenProgram(Exception):
    """The user's module raised while it was imported. Shows the user's frames, not ours."""

    def __init__(self, reference: str, error: Exception | SystemExit) -> None:
        super().__init__(f"{reference} cannot be imported: {type(error).__name__}: {error}")
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith((OURS, *IMPORTING))
        ]
        self.where = "".join(
            [
                *(["Traceback (most recent call last):\n"] if frames else []),
                *traceback.format_list(frames),
                *traceback.format_exception_only(error),
            ]
        )


def parts_of(reference: str) -> tuple[str, str]:
    """The module and the attribute of it that `module:attribute` names."""
    module_name, colon, attribute = reference.partition(":")
    if module_name.endswith(".py"):
        module = ".".join(part for part in PurePath(module_name[:-3]).parts if part.isidentifier())
        raise click.UsageError(
            f"{module_name!r} is a file; name its module, from the folder where Python finds it:"
            f" {module or 'shop'}:{attribute or 'app'}"
        )
    if not module_name or not colon or not attribute:
        raise click.UsageError(
            f"{reference!r} must look like module:app, as in {module_name or 'shop'}:app"
        )
    return module_name, attribute


def find_app(reference: str) -> App:
    """The app `module:attribute` names; the current directory is searched first."""
    module_name, attribute = parts_of(reference)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with _warn_if_slow(module_name):
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise BrokenProgram(reference, error) from error
        raise click.UsageError(
            f"there is no module {module_name!r} in {os.getcwd()} or among installed packages"
        ) from None
    except (Exception, SystemExit) as error:
        # A program that exits while it is imported would end this command as if it were done.
        raise BrokenProgram(reference, error) from error
    found: object = getattr(module, attribute, None)
    if found is None:
        apps = [
            f"{module_name}:{name}" for name, each in vars(module).items() if isinstance(each, App)
        ]
        known = f"; did you mean {', '.join(apps)}?" if apps else ", nor any other flowfabric App"
        raise click.UsageError(f"module {module_name!r} has no {attribute!r}{known}")
    if not isinstance(found, App):
        raise click.UsageError(f"{reference} is a {type(found).__name__}, not a flowfabric App")
    IMPORTED.append(reference)
    return found


@contextmanager
def _warn_if_slow(module_name: str) -> Iterator[None]:
    """Say which line a slow import has reached: the program may be running while imported."""
    importing = threading.get_ident()

    def warn() -> None:
        frame = sys._current_frames().get(importing)
        places = list(traceback.walk_stack(frame))
        # The outermost line that is still at work in the program itself.
        own = [f"{at.f_code.co_filename}:{line}" for at, line in places if _is_top(at)]
        where = f" (at {own[-1]})" if own else ""
        click.secho(
            f"importing {module_name} takes long{where}: what should run only with `python"
            f' {module_name}.py` belongs under `if __name__ == "__main__":`',
            fg="yellow",
            err=True,
        )

    timer = threading.Timer(IMPORT_PATIENCE_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_top(frame: types.FrameType) -> bool:
    """Whether a frame runs the body of a module, which is not part of Python's own import."""
    return frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__"


def duration_of(option: str, text: str) -> int:
    """Milliseconds; on the command line, a number alone means seconds."""
    return duration_ms(option, int(text) if text.isdecimal() else text)


def _text(value: object) -> str | None:
    """An empty URL or app counts as missing, like an unset variable in a script."""
    return str(value) if value else None


def _namespace(value: object) -> str | None:
    """Refuse an empty one: an unset variable in a script must not mean all namespaces."""
    return None if value is None else parse_namespace(value)


# Options that say which executions a command is about -----------------------

UNFINISHED: Final = "unfinished"
"""Every state in which an execution has not ended."""
BLOCKED: Final = "blocked"
"""Delayed because its code has changed, as lists show it."""


class Chosen(Struct, frozen=True, kw_only=True):
    """The filter options as they were given; times are still relative to the database's clock."""

    states: tuple[str, ...] = ()
    lane: str | None = None
    kind: str | None = None
    tag: tuple[str, str] | None = None
    since: str | None = None
    before: str | None = None

    def fits(self, execution: ExecutionSnapshot) -> bool:
        """Whether a matching execution is meant: blocked ones have the state delayed, too."""
        blocked_only = BLOCKED in self.states and not {UNFINISHED, "delayed"} & {*self.states}
        delayed = execution.public_state is PublicState.DELAYED
        return execution.blocked or not (blocked_only and delayed)

    @property
    def empty(self) -> bool:
        # Empty text is not the same as none: it is refused instead of matching everything.
        return self == Chosen()

    async def resolve(self, engine: Engine, target: Target) -> ExecutionFilter:
        now_ms = await engine.server_time_ms()
        return ExecutionFilter(
            states=tuple(state for each in self.states for state in _states(each)),
            lane_id=self.lane,
            execution_kind=self.kind,
            tag=self.tag,
            namespace=target.scope(),
            created_after_ms=_time("since", self.since, now_ms),
            created_before_ms=_time("before", self.before, now_ms),
        )


def filter_options(command: Callable[Concatenate[Chosen, P], T]) -> Callable[P, T]:
    """Adds the filter options; the command gets them as its first argument, `Chosen`."""

    @click.option(
        "--state",
        "states",
        multiple=True,
        metavar="STATE",
        type=click.Choice([*(state.value for state in PublicState), BLOCKED, UNFINISHED]),
        help="Only in this state, such as waiting or failed; unfinished means every state"
        " before the end. Repeatable.",
    )
    @click.option("--lane", help="Only in this lane.")
    @click.option("--kind", help="Only of this task.")
    @click.option(
        "--tag",
        metavar="KEY=VALUE",
        callback=lambda _context, _option, text: None if text is None else pair(text),
        help="Only with this tag.",
    )
    @click.option(
        "--since", metavar="WHEN", help="Only created after: 2h (ago), or 2026-03-29T06:00."
    )
    @click.option("--before", metavar="WHEN", help="Only created before, in the same form.")
    @click.pass_context
    @wraps(command)
    def wrapped(context: click.Context, /, *args: P.args, **kwargs: P.kwargs) -> T:
        given = dict(kwargs)
        values = {name: given.pop(name) for name in Chosen.__struct_fields__}
        chosen = msgspec.convert(values, Chosen)
        return context.invoke(command, chosen, *args, **given)

    return wrapped


def _states(text: str) -> list[PublicState]:
    if text == UNFINISHED:
        return [state for state in PublicState if state not in TERMINAL_STATES]
    return [PublicState.DELAYED if text == BLOCKED else PublicState(text)]


def pair(text: str) -> tuple[str, str]:
    """The key and the value of `--tag KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not equals:
        raise click.BadParameter("must look like KEY=VALUE", param_hint="--tag")
    return key, value


def _time(option: str, text: str | None, now_ms: int) -> int | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        try:
            return max(0, now_ms - duration_ms(option, text))
        except errors.InvalidInput:
            raise click.BadParameter(
                f"{text!r} is neither a duration such as 2h nor a time such as 2026-03-29T06:00",
                param_hint=f"--{option}",
            ) from None
    # A time without a zone is local time: the user read it off a local clock.
    return max(0, round(at.astimezone(UTC).timestamp() * 1_000))


# Exit statuses, for scripts --------------------------------
#
# | Status | Meaning |
# |---|---|
# | 0 | done |
# | 1 | something else went wrong, or the awaited work failed, or some of several IDs do not exist |
# | 2 | the command line, or a value on it, makes no sense |
# | 3 | there is no such execution, lane, schedule … |
# | 4 | refused: the state of things does not allow it, or others were quicker |
# | 5 | the database cannot be reached, or its schema does not fit |
# | 6 | the server refuses the token, or what it asks for |
# | 130 | interrupted |

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
NOT_FOUND: Final = 3
REFUSED: Final = 4
UNAVAILABLE: Final = 5
DENIED: Final = 6
INTERRUPTED: Final = 130

_BY_CLASS: Final[tuple[tuple[type[errors.FlowFabricError], int], ...]] = (
    (errors.NotFound, NOT_FOUND),
    (errors.Validation, USAGE),
    (errors.Contention, REFUSED),
    (errors.Conflict, REFUSED),
    (errors.StateConflict, REFUSED),
    (errors.AccessDenied, DENIED),
    (errors.Transport, UNAVAILABLE),
    (errors.Unavailable, UNAVAILABLE),
    (errors.ResourceExhausted, UNAVAILABLE),
    (errors.OperationTimeout, UNAVAILABLE),
)


def status_of(error: errors.FlowFabricError) -> int:
    return next((status for kind, status in _BY_CLASS if isinstance(error, kind)), FAILED)
