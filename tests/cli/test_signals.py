"""`signal` and `waitpoints`, by the real command."""

import pytest

from flowfabric import App, Context, Engine, SignalToken
from flowfabric.core.states import PublicState
from flowfabric.run import Run
from tests.apps import reached, working
from tests.cli.command import run


async def waiting(app: App) -> Run[object]:
    """An execution that waits for `approved`, with no worker left."""

    @app.task
    async def gate(ctx: Context) -> object:
        signal = await ctx.wait_for_signal("approved", timeout="2d")
        return [signal.payload, signal.source, signal.source_type]

    submitted = await app.submit(app.tasks["gate"]())
    async with working(app):
        await reached(submitted, PublicState.SUSPENDED)
    return submitted


async def outcome(app: App, submitted: Run[object]) -> object:
    async with working(app):
        return await submitted.result(timeout="20s")


async def test_an_operator_sees_what_is_waited_for_and_sends_it(url: str) -> None:
    async with App(url) as app:
        submitted = await waiting(app)
        listed = run("waitpoints", url=url)
        assert listed.status == 0
        header, row = listed.lines
        assert header.split() == ["ID", "KIND", "WAITS", "FOR", "SINCE", "UNTIL"]
        assert submitted.execution_id[-12:] in row
        assert row.split()[1:3] == ["gate", "approved"]

        ran = run(
            "signal",
            submitted.execution_id[-12:],
            "approved",
            *("--payload", '{"n": 1}', "--source", "ada"),
            url=url,
        )
        assert (ran.status, ran.err) == (0, "")
        assert ran.lines == [
            f"approved to {submitted.execution_id[-36:]}: accepted; the execution goes on"
        ]
        assert await outcome(app, submitted) == [{"n": 1}, "ada", "operator"]
        empty = run("waitpoints", url=url)
        assert (empty.status, empty.out) == (0, "")
        assert "Nothing waits" in empty.err


async def test_a_signal_of_another_name_says_what_is_waited_for(url: str) -> None:
    async with App(url) as app:
        submitted = await waiting(app)
        ran = run("signal", submitted.execution_id, "aproved", url=url)
        assert ran.out.startswith(f"aproved to {submitted.execution_id[-36:]}: kept: ")
        assert " ".join(ran.out.split()).endswith("waits for 'approved'; did you mean that?")
        await submitted.cancel()
        late = run("signal", submitted.execution_id, "approved", url=url)
        assert late.status == 4
        assert "was cancelled, so it takes no signals (replay it first)" in late.err


@pytest.mark.parametrize("by_variable", [False, True])
async def test_a_token_is_enough_and_is_never_shown(url: str, by_variable: bool) -> None:
    async with App(url) as app:
        submitted = await waiting(app)
        token = await app.signals.token(submitted.execution_id, "approved")
        text = token.reveal()
        secrets = (text, token.secret.reveal().rpartition(":")[2])
        wrong = run("signal", submitted.execution_id, "approved", "--token", f"{text}x", url=url)
        assert wrong.status == 2
        listed = run("waitpoints", "--json", url=url)
        assert listed.document["name"] == "approved"
        shown = run("show", submitted.execution_id, url=url)
        arguments = ["signal", submitted.execution_id, "approved", "--key", "once", "--json"]
        variable = text if by_variable else ""
        given = [] if by_variable else ["--token", text]
        first = run(*arguments, *given, url=url, FLOWFABRIC_SIGNAL_TOKEN=variable)
        again = run(*arguments, *given, url=url, FLOWFABRIC_SIGNAL_TOKEN=variable)
        assert (first.status, again.status) == (0, 0)
        assert first.document["effect"] == "resume_condition_satisfied"
        assert again.document == {**first.document, "effect": "duplicate"}
        for ran in (wrong, listed, shown, first, again, run("events", url=url)):
            for secret in secrets:
                assert secret not in ran.out + ran.err
        payload, _, kind = _three(await outcome(app, submitted))
        assert (payload, kind) == (None, "external")


def _three(value: object) -> tuple[object, object, object]:
    assert isinstance(value, list)
    first, second, third = value
    return first, second, third


async def test_what_cannot_be_sent_says_why(url: str, engine: Engine) -> None:
    async with App(url) as app:
        submitted = await waiting(app)
        other = run("signal", submitted.execution_id, "rejected", "--no-keep", url=url)
        assert other.status == 4
        assert "it waits for 'approved'" in other.err
        kept = run("signal", submitted.execution_id, "rejected", url=url)
        assert "kept: the next wait for it takes it" in kept.out
        shown = run("show", submitted.execution_id, url=url)
        assert "1 signal is kept for its next waits: 'rejected'" in " ".join(shown.out.split())
        garbled = run("signal", submitted.execution_id, "approved", "--payload", "{", url=url)
        assert garbled.status == 2
        assert "--payload" in garbled.err
        missing = run("signal", "0" * 12, "approved", url=url)
        assert missing.status == 3
        assert isinstance(await app.signals.token(submitted.execution_id, "approved"), SignalToken)
