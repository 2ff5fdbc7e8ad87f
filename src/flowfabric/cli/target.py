"""Which database a command works on, and the options every command shares."""

import asyncio
import importlib
import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from shlex import quote
from typing import Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import unquote

import click
from click.core import ParameterSource
from msgspec import Struct

from flowfabric.app import App
from flowfabric.connection import connect
from flowfabric.core.ids import ExecutionId
from flowfabric.engine.engine import Engine
from flowfabric.errors import Transport, Unavailable
from flowfabric.signals import check_namespace
from flowfabric.store.urls import SQLITE, redact

P = ParamSpec("P")
T = TypeVar("T")

URL_VARIABLE: Final = "FLOWFABRIC_URL"
APP_VARIABLE: Final = "FLOWFABRIC_APP"
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

    def scope(self) -> str | None:
        """The namespace the command is about: as given, or that of the app; None for all."""
        if self.namespace is not None or self.app is None:
            return self.namespace
        return find_app(self.app).namespace

    async def find(self, engine: Engine, text: str) -> ExecutionId:
        """The execution an id or a part of it stands for, in the namespace meant."""
        scope = self.scope()
        found = await engine.resolve_execution_id(text, namespace=scope)
        if scope is not None:
            await check_namespace(engine, found, scope, text)
        return found

    async def open(self) -> Engine:
        """Connect to a database that exists."""
        url = self.database()
        check_file(url)
        try:
            codec = None if self.app is None else find_app(self.app).codec
            return await connect(url, set_up=False, codec=codec)
        except Transport as error:
            problem = error.detail.removeprefix(f"transport ({error.backend}): ")
            raise Unavailable(redact(url), f"cannot be reached: {problem}") from error


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
    """Adds --url, --app and --json; the command gets them as its first argument."""

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
            # What was typed beats what is set; otherwise the database beats the program.
            if _typed(context, "app") and not _typed(context, "url"):
                url = None
            else:
                app = None
        target = Target(
            url=url,
            app=app,
            json=bool(given.pop("as_json", False)),
            namespace=_text(given.pop("namespace", None)),
        )
        return context.invoke(command, target, *args, **given)

    return wrapped


def _typed(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


namespace_option = click.option(
    "--namespace", help="In this namespace.  [default: that of the app, or all]"
)
"""For a command that has `options`, too, and is about what exists."""
own_namespace_option = click.option(
    "--namespace", help="In this namespace.  [default: that of the app, or `default`]"
)
"""For a command about one thing that every namespace may have under the same name."""


def with_engine(
    command: Callable[Concatenate[Engine, Target, P], Awaitable[T]],
) -> Callable[Concatenate[Target, P], T]:
    """Runs a coroutine with an open engine, and closes it."""

    @wraps(command)
    def wrapped(target: Target, /, *args: P.args, **kwargs: P.kwargs) -> T:
        async def run() -> T:
            async with await target.open() as engine:
                return await command(engine, target, *args, **kwargs)

        return asyncio.run(run())

    return wrapped


def check_file(url: str) -> None:
    """A mistyped path would otherwise leave an empty database behind."""
    path = unquote(url.removeprefix(SQLITE))
    if url.startswith(SQLITE) and path != ":memory:" and not Path(path).exists():
        raise Unavailable(
            "sqlite",
            f"there is no database at {path}; to create it, run: flowfabric migrate --url"
            f" {quote(url)}",
        )


class BrokenProgram(Exception):
    """The user's module raised while it was imported. Its own frames are shown, not ours."""

    def __init__(self, reference: str, error: Exception) -> None:
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
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise BrokenProgram(reference, error) from error
        raise click.UsageError(
            f"there is no module {module_name!r} in {os.getcwd()} or among installed packages"
        ) from None
    except Exception as error:
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
    return found


def _text(value: object) -> str | None:
    return str(value) if value else None
