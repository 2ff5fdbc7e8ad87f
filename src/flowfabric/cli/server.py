"""`serve`, `tokens` and `reconcile`: the HTTP server, its tokens, and the reconcilers."""

import asyncio
import ipaddress
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

import click
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.logs import configure, log_level_option
from flowfabric.cli.screen import fixed, flexible
from flowfabric.core.api_tokens import ApiToken, Scope
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.engine.engine import Engine
from flowfabric.engine.paging import pages
from flowfabric.errors import Unavailable
from flowfabric.logs import open_log
from flowfabric.reconcilers import Supervisor
from flowfabric.stop_signals import heeded

F = TypeVar("F", bound=Callable[..., object])
log = open_log(__name__)

MISSING: Final = (
    "the HTTP server needs more packages; install them with: pip install 'flowfabric[server]'"
)
ORIGIN: Final = re.compile(r"https?://[a-z0-9.:\[\]-]+")
TOKEN_COLUMNS: Final = (
    fixed("ID"),
    flexible("NAME"),
    flexible("SCOPES", at_least=20),
    flexible("NAMESPACE"),
    fixed("STATE"),
    fixed("EXPIRES"),
)


def at_most(flag: str, name: str, default: int, help_text: str) -> Callable[[F], F]:
    """An option for a limit of the server."""
    return click.option(
        flag, name, default=default, show_default=True, type=click.IntRange(1), help=help_text
    )


class Origin(click.ParamType[str]):
    """An origin as browsers send it: any other spelling would never match."""

    name = "origin"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        origin = str(value)
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            self.fail(f"must be an origin, such as https://example.org (got {origin!r})")
        return origin


class ProxyAddress(click.ParamType[str]):
    name = "address"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        address = str(value)
        try:
            ipaddress.ip_network(address)
        except ValueError:
            self.fail(f"must be an address or a network, such as 10.0.0.0/8 (got {address!r})")
        return address


@click.command("serve", short_help="Serve the database over HTTP.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port",
    default=9090,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="The port to listen on; 0 for any.",
)
@click.option(
    "--cors-origin",
    "origins",
    type=Origin(),
    multiple=True,
    metavar="ORIGIN",
    help="Allow requests of web pages from this origin, such as https://example.org; repeatable.",
)
@click.option(
    "--insecure", is_flag=True, help="Let anybody do anything, without a token, from anywhere."
)
@click.option(
    "--trusted-proxy",
    "proxies",
    type=ProxyAddress(),
    multiple=True,
    metavar="ADDRESS",
    help="Trust X-Forwarded-For from this proxy; repeatable.",
)
@click.option(
    "--drain",
    "drain_s",
    default=30,
    show_default=True,
    type=click.IntRange(1, 3_600),
    metavar="SECONDS",
    help="How long open requests may take once it is told to stop.",
)
@at_most(
    "--requests-per-minute", "requests_max", 60_000, "For each token, or each address without one."
)
@at_most(
    "--long-polls",
    "waiting_max",
    1_000,
    "How many requests may wait at once for something to happen.",
)
@at_most(
    "--streams",
    "streams_max",
    10_000,
    "How many streams of server-sent events may be open at once.",
)
@click.option(
    "--reconcile/--no-reconcile",
    "reconciles",
    default=True,
    help="Whether it also runs the reconcilers, as workers do.  [default: reconcile]",
)
@log_level_option
@options.target_options
def serve(
    target: options.Target,
    /,
    host: str,
    port: int,
    origins: tuple[str, ...],
    insecure: bool,
    proxies: tuple[str, ...],
    drain_s: int,
    reconciles: bool,
    log_level: str,
    **limits: int,
) -> int:
    """Serve the database over HTTP until it is stopped; /docs describes every request.

    Callers need a token (`flowfabric tokens create`). While there is none, it serves this machine
    only.
    """
    try:
        from flowfabric.server import serve as serving
        from flowfabric.server.api import ServerConfig
    except ImportError as error:
        raise Unavailable("serve", f"{MISSING} ({error.name} is missing)") from None
    target.check_is_database("a server does not serve another")
    configure(log_level, as_json=target.json or None)
    listening = serving.Listening(
        host=host, port=port, drain_s=drain_s, reconciles=reconciles, trusted_proxies=proxies
    )
    config = ServerConfig(cors_origins=origins, anybody=listening.takes(insecure), **limits)

    async def run() -> bool:
        async with await target.open() as engine:

            @asynccontextmanager
            async def connected() -> AsyncIterator[Engine]:
                yield engine

            await serving.check_guarded(connected, listening, insecure=insecure)
            if insecure:
                warning = "anybody may do everything here, with or without a token"
                log.warning(
                    "--insecure: %s%s", warning, "" if listening.is_local else ", from afar"
                )
            if not target.json:
                screen.err().print(
                    f"serving at http://{host}:{port}, described at /docs", soft_wrap=True
                )
            return await serving.serve(connected, listening, config)

    return options.OK if asyncio.run(run()) else options.FAILED


@click.command("reconcile", short_help="Run the reconcilers only.")
@log_level_option
@options.target_options
def reconcile(target: options.Target, log_level: str) -> int:
    """End delays and leases, apply timeouts, fire schedules and delete what is old.

    Runs until it is stopped. Workers and servers do the same beside their work; any number of
    processes may.
    """
    target.check_is_database("what is due there, its server sees to")
    configure(log_level, as_json=target.json or None)
    return asyncio.run(_reconcile(target))


async def _reconcile(target: options.Target) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in heeded():
        loop.add_signal_handler(number, stopped.set)
    async with await target.open() as engine, Supervisor(engine) as supervisor:
        await stopped.wait()
        await supervisor.drain()
    return options.OK


@click.group("tokens")
def tokens() -> None:
    """Create, list and revoke tokens for the HTTP server."""


@tokens.command("create")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    required=True,
    type=click.Choice([str(scope) for scope in Scope]),
    help="What it allows; repeatable.",
)
@click.option("--namespace", help="Only in this namespace.  [default: in every one]")
@click.option(
    "--expires", metavar="DURATION", help="How long it is valid, such as 90d.  [default: for good]"
)
@options.on_engine()
async def create(
    engine: Engine,
    target: options.Target,
    name: str,
    scopes: tuple[str, ...],
    expires: str | None,
) -> None:
    """Create a token for NAME, a machine or a person. It is shown only once."""
    created = await engine.create_token(
        name,
        scopes=scopes,
        namespace=target.namespace,
        expires_in_ms=None if expires is None else options.duration_of("--expires", expires),
    )
    if target.json:
        screen.emit({"token": created.token, **_shown(created.stored)})
    else:
        click.echo(created.token)
        click.echo("Keep it safe: it cannot be shown again.", err=True)


@tokens.command("list")
@options.on_engine()
async def list_tokens(engine: Engine, target: options.Target) -> None:
    """List tokens, including revoked and expired ones."""
    found = pages(lambda cursor: engine.list_tokens(cursor=cursor, limit=PAGE_MAX))
    tokens = [token async for page in found for token in page.tokens]
    if target.json:
        screen.emit({"tokens": [_shown(token) for token in tokens]})
        return
    now_ms = await engine.server_time_ms()
    rows = [_row(token, now_ms) for token in tokens]
    screen.show(tokens, TOKEN_COLUMNS, rows, as_json=False, nothing="There are no tokens.")


def _row(token: ApiToken, now_ms: int) -> tuple[str | Text, ...]:
    live = token.is_live(now_ms)
    state = "live" if live else "revoked" if token.revoked_at_ms else "expired"
    return (
        token.token_id,
        token.name,
        token.scopes,
        token.namespace or "every one",
        Text(state, "green" if live else "dim"),
        "never" if token.expires_at_ms is None else screen.ago(token.expires_at_ms, now_ms),
    )


@tokens.command("revoke")
@click.argument("token_id", metavar="ID")
@options.on_engine()
async def revoke(engine: Engine, target: options.Target, token_id: str) -> None:
    """Revoke the token with this ID; servers notice within seconds."""
    revoked = await engine.revoke_token(token_id)
    sentence = f"revoked {revoked.token_id} ({revoked.name})"
    screen.answer(_shown(revoked), sentence, as_json=target.json)


def _shown(token: ApiToken) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "name": token.name,
        "scopes": token.scopes.split(),
        "namespace": token.namespace,
        "created_at_ms": token.created_at_ms,
        "expires_at_ms": token.expires_at_ms,
        "revoked_at_ms": token.revoked_at_ms,
    }
