"""`signal` and `waitpoints`: see what executions wait for, and send it."""

from typing import Final

import click
import msgspec
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import flexible, right
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.ids import ExecutionId
from flowfabric.core.policies import span
from flowfabric.core.records import SignalEffect
from flowfabric.core.signals import SignalDuplicate
from flowfabric.engine.engine import Engine
from flowfabric.engine.waitpoints import InboxEntry
from flowfabric.signals import send

SIGNAL_TOKEN_VARIABLE: Final = "FLOWFABRIC_SIGNAL_TOKEN"

_EFFECTS: Final = {
    SignalEffect.SATISFIED: "accepted; the execution goes on",
    SignalEffect.APPENDED: "accepted; it waits for more",
    SignalEffect.BUFFERED: "kept until it waits for it",
    SignalEffect.KEPT: "kept: the next wait for it takes it",
}
_LEFT: Final = "kept: the present wait does not need it, a later one may"


@click.command("signal", short_help="Send an execution what it waits for.")
@click.argument("execution_id", metavar="ID")
@click.argument("name")
@click.option("--payload", metavar="JSON", help="What to send along.")
@click.option(
    "--token",
    envvar=SIGNAL_TOKEN_VARIABLE,
    show_envvar=True,
    help="Send with this token, instead of as an operator.",
)
@click.option("--source", help="Who sends it.  [default: you]")
@click.option("--key", help="Idempotency key: the same key is accepted once.")
@click.option(
    "--keep/--no-keep",
    default=True,
    help="Keep it for the next wait of that name when nothing waits for it.  [default: keep]",
)
@options.on_engine("any")
async def signal(
    engine: Engine,
    target: options.Target,
    execution_id: str,
    name: str,
    payload: str | None,
    token: str | None,
    source: str | None,
    key: str | None,
    keep: bool,
) -> None:
    """Send the signal NAME to the execution ID, which waits for it or will."""
    document = _json(payload)
    found = await target.find(engine, execution_id)
    answer = await send(
        engine,
        found,
        name,
        document,
        token=token,
        source=options.user() if source is None else source,
        idempotency_key=key,
        keep=keep,
    )
    if isinstance(answer, SignalDuplicate):
        signal_id, effect, sentence = answer.existing_signal_id, "duplicate", "was accepted before"
    else:
        signal_id, effect = answer.signal_id, answer.effect.value
        left = answer.kept and answer.effect not in (SignalEffect.KEPT, SignalEffect.BUFFERED)
        sentence = _LEFT if left else _EFFECTS[answer.effect]
        if answer.effect is SignalEffect.KEPT:
            sentence += await _awaited_instead(engine, found)
    if target.json:
        screen.emit({"execution_id": found, "signal_id": signal_id, "effect": effect})
    else:
        screen.out().print(Text(f"{name} to {await engine.called(found)}: {sentence}"))


async def _awaited_instead(engine: Engine, execution_id: ExecutionId) -> str:
    """What the execution waits for, which the sender of another name may have meant."""
    found = (await engine.list_pending_waitpoints(execution_id, limit=PAGE_MAX)).waitpoints
    names = dict.fromkeys(repr(str(each.waitpoint_key)) for each in found)
    if not names:
        return ""
    called = await engine.called(execution_id)
    which = "that" if len(names) == 1 else "one of those"
    return f". {called} waits for {', '.join(names)}; did you mean {which}?"


@click.command("waitpoints", short_help="See what suspended executions wait for.")
@click.option(
    "--limit",
    type=click.IntRange(1, PAGE_MAX),
    default=100,
    show_default=True,
    help="At most this many executions.",
)
@options.on_engine("any")
async def waitpoints(engine: Engine, target: options.Target, limit: int) -> None:
    """List what suspended executions wait for, longest first. Tokens are never shown."""
    entries = (await engine.list_inbox(namespace=target.scope(), limit=limit)).entries
    now_ms = await engine.server_time_ms()
    columns = (
        screen.id_column(),
        flexible("KIND"),
        flexible("WAITS FOR"),
        right("SINCE"),
        right("UNTIL"),
    )
    rows = [_row(entry, now_ms) for entry in entries]
    nothing = "Nothing waits for a signal."
    screen.show(entries, columns, rows, as_json=target.json, nothing=nothing)


def _row(entry: InboxEntry, now_ms: int) -> tuple[str, ...]:
    until_ms = entry.timeout_at_ms
    left = "" if until_ms is None else f"in {span(max(0, until_ms - now_ms))}"
    return (
        entry.own_id or screen.short_id(entry.execution_id),
        entry.execution_kind,
        str(entry.name),
        screen.ago(entry.suspended_at_ms, now_ms),
        left,
    )


def _json(text: str | None) -> object:
    if text is None:
        return None
    try:
        document: object = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise click.BadParameter(f"is not JSON: {error}", param_hint="--payload") from None
    return document
