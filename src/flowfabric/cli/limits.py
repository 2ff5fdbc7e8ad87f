"""`limits`: list, show, set, reset, remove."""

from collections.abc import Sequence
from typing import Final

import click
from msgspec import structs
from rich.text import Text

from flowfabric.cli import options, screen
from flowfabric.cli.screen import fixed, flexible, right, whole
from flowfabric.core.bounds import PAGE_MAX
from flowfabric.core.limits import LimitSource, QuotaPolicy, QuotaSpec, declared_spec
from flowfabric.engine.engine import Engine
from flowfabric.engine.paging import pages
from flowfabric.limits import rate_text, spec_of, status_of

COLUMNS: Final = (
    whole("LIMIT"),
    right("RATE"),
    right("AT ONCE"),
    fixed("SET BY"),
    flexible("DECLARED"),
)
USE_COLUMNS: Final = (
    whole("KEY"),
    right("RUNNING"),
    right("STARTED"),
    fixed("ROOM"),
)
SHOWN_MAX: Final = 1_000
"""Keys that `show` lists."""


@click.group("limits")
def limits() -> None:
    """See and change limits: how many runs may start and run at once."""


@limits.command("list")
@options.on_engine("any")
async def list_limits(engine: Engine, target: options.Target) -> None:
    """List limits. With --json: one per line."""
    found = pages(
        lambda at: engine.list_limits(namespace=target.scope(), cursor=at, limit=PAGE_MAX)
    )
    _show(target, [policy async for page in found for policy in page.limits])


@limits.command("show")
@click.argument("limit")
@click.option("--after", help="List keys after this one.")
@options.on_engine("own")
async def show_limit(engine: Engine, target: options.Target, limit: str, after: str | None) -> None:
    """Show what LIMIT is, and what each value of its key uses now."""
    policy = await engine.read_limit(limit, namespace=target.own_namespace())
    page = await engine.list_limit_use(policy.quota_policy_id, cursor=after, limit=SHOWN_MAX)
    if target.json:
        screen.emit({"limit": status_of(policy), "keys": page.gates})
        return
    _show(target, [policy])
    now_ms = await engine.server_time_ms()
    rows: list[tuple[str | Text, ...]] = [
        (
            each.key or "(all)",
            f"{each.running:,}",
            f"{each.started:,}" if policy.max_requests_per_window else "",
            "" if each.opens_at_ms is None else screen.ago(each.opens_at_ms, now_ms),
        )
        for each in page.gates
    ]
    if rows:
        screen.out().print(screen.table(USE_COLUMNS, rows))
    if page.next_cursor is not None:
        screen.err().print(Text(f"More: --after {page.next_cursor}", style="dim"))


@limits.command("set")
@click.argument("limit")
@click.option("--rate", help='Starts per period, such as "100/m"; any number if omitted.')
@click.option("--concurrency", type=int, help="Runs at once; any number if omitted.")
@click.option(
    "--while-suspended",
    type=click.Choice(["release", "keep"]),
    help="Whether runs that sleep or wait hold their places; unchanged if omitted.",
)
@options.on_engine("own")
async def set_limit(
    engine: Engine,
    target: options.Target,
    limit: str,
    rate: str | None,
    concurrency: int | None,
    while_suspended: str | None,
) -> None:
    """Set LIMIT to these values, whatever programs declare.

    Without --rate and --concurrency it limits nothing until you reset it.
    """
    terms = structs.asdict(spec_of(rate, concurrency)) | {"while_suspended": while_suspended}
    policy = await engine.set_limit(limit, namespace=target.own_namespace(), **terms)
    _show(target, [policy])
    used = await engine.list_limit_use(policy.quota_policy_id, limit=1)
    if policy.declared is None and not used.gates:
        screen.err().print("No program has declared this limit yet: it limits nothing.")


@limits.command("reset")
@click.argument("limit")
@options.on_engine("own")
async def reset_limit(engine: Engine, target: options.Target, limit: str) -> None:
    """Use the values that programs declare for LIMIT again."""
    _show(target, [await engine.reset_limit(limit, namespace=target.own_namespace())])


@limits.command("remove")
@click.argument("limit")
@options.on_engine("own")
async def remove_limit(engine: Engine, target: options.Target, limit: str) -> None:
    """Forget LIMIT. A program that declares it brings it back.

    Refused while runs that were under it are kept; set it without values to lift it.
    """
    removed = await engine.remove_limit(limit, namespace=target.own_namespace())
    screen.answer(status_of(removed), f"{limit} is removed", as_json=target.json)


def _show(target: options.Target, found: Sequence[QuotaPolicy]) -> None:
    documents = [
        {"namespace": policy.namespace, **structs.asdict(status_of(policy))} for policy in found
    ]
    rows = [_row(policy) for policy in found]
    screen.show(documents, COLUMNS, rows, as_json=target.json, nothing="No limits.")


def _row(policy: QuotaPolicy) -> tuple[str | Text, ...]:
    stored = policy.source is LimitSource.STORED
    return (
        screen.named(policy.namespace, policy.name),
        rate_text(policy.spec) or "",
        _at_once(policy.spec),
        Text("people", style="yellow") if stored else "program",
        _declared(policy) if stored else "",
    )


def _declared(policy: QuotaPolicy) -> str:
    spec = declared_spec(policy)
    if spec is None:
        return "nothing"
    at_once = _at_once(spec)
    parts = [rate_text(spec), f"{at_once} at once" if at_once else None]
    return ", ".join(part for part in parts if part)


def _at_once(spec: QuotaSpec) -> str:
    """How many at once, and whether runs that sleep or wait count."""
    cap = spec.active_concurrency_cap
    keeps = ", suspended too" if spec.limits.keeps else ""
    return f"{cap:,}{keeps}" if cap else ""
