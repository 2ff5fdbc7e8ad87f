"""The command line without a database: it asks a server, with the token it is given."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric import Engine
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.server.api import ServerConfig
from tests.cli.command import Ran, run
from tests.server.conftest import serving

SCOPES = ("read", "operate")


@pytest.fixture
async def url(engine: Engine) -> AsyncIterator[str]:
    async with serving(engine, ServerConfig()) as place:
        yield place


async def ran(url: str, *arguments: str, token: str = "") -> Ran:
    """The server answers on this event loop, while the command runs."""
    return await asyncio.to_thread(lambda: run(*arguments, url=url, FLOWFABRIC_TOKEN=token))


def verdicts(told: Ran) -> dict[str, str]:
    findings = told.document["findings"]
    assert isinstance(findings, list)
    return {each["check"]: each["verdict"] for each in findings}


async def test_doctor_examines_through_a_server_what_the_token_allows(
    url: str, engine: Engine
) -> None:
    every = await engine.create_token("every", scopes=SCOPES)
    confined = await engine.create_token("one", scopes=SCOPES, namespace="shop")

    seen = await ran(url, "doctor", "--json", token=every.token)
    little = await ran(url, "doctor", "--json", token=confined.token)

    assert (seen.status, little.status) == (0, 0), seen.err + little.err
    # How fast the machine is, and what the test's clock says, is no matter here.
    rest = {"package", "database", "latency", "clock", "wake-ups"}
    assert verdicts(seen).keys() == verdicts(little).keys() >= rest
    assert {check: told for check, told in verdicts(seen).items() if check not in rest} == {
        "workers": "warning",
        "timers": "fine",
        "lanes": "fine",
        "audit": "fine",
    }
    assert {check: told for check, told in verdicts(little).items() if check not in rest} == {
        "workers": "warning",
        "timers": "warning",
        "lanes": "warning",
        "audit": "warning",
    }
    assert "not checked: " in little.out
    assert "needs the database itself" not in seen.out + seen.err


@pytest.mark.parametrize("command", [("ls",), ("doctor",), ("tokens", "list")])
async def test_whoever_has_no_token_is_refused(url: str, command: tuple[str, ...]) -> None:
    for token in ("", "ff_wrong"):
        refused = await ran(url, *command, token=token)

        assert refused.status == 6, refused
        assert "missing or invalid Authorization header" in refused.err
        assert "FLOWFABRIC_TOKEN" in refused.err
        assert "cannot be reached" not in refused.err


async def test_a_token_that_does_not_allow_a_command_is_refused(url: str, engine: Engine) -> None:
    made = await engine.create_token("ci", scopes=["read"], namespace="shop")

    for command in (("tokens", "list"), ("ls", "--namespace", "bank"), ("lanes", "list")):
        refused = await ran(url, *command, token=made.token)
        assert refused.status == 6, refused
    allowed = await ran(url, "ls", token=made.token)
    assert allowed.status == 0, allowed.err


@pytest.mark.parametrize(
    "command", [("serve",), ("reconcile",), ("migrate",), ("migrate", "--check")], ids=" ".join
)
def test_what_needs_the_database_refuses_a_server(command: tuple[str, ...]) -> None:
    refused = run(*command, url="http://127.0.0.1:1")

    assert refused.status == 2
    assert "--url: must be the database: " in refused.err
    assert "serving at" not in refused.err


@pytest.mark.parametrize("verb", ["pause", "drain", "resume"])
async def test_lanes_are_steered_through_a_server(url: str, engine: Engine, verb: str) -> None:
    await engine.register_lane("gpu")
    made = await engine.create_token("operator", scopes=["operate"])

    steered = await ran(url, "lanes", verb, "gpu", token=made.token)

    assert (steered.status, steered.err) == (0, "")
    assert "lane gpu is " in steered.out


@pytest.mark.parametrize("verb", ["pause", "resume", "remove"])
async def test_schedules_are_steered_through_a_server(url: str, engine: Engine, verb: str) -> None:
    await engine.upsert_schedule(
        ScheduleDefinition(schedule_id="nightly", execution_kind="report", every_ms=60_000)
    )
    made = await engine.create_token("operator", scopes=["operate", "submit"])

    steered = await ran(url, "schedules", verb, "nightly", token=made.token)

    assert (steered.status, steered.err) == (0, "")
    assert "schedule nightly is " in steered.out


async def test_a_namespace_that_is_empty_does_not_mean_all_of_them(
    url: str, engine: Engine
) -> None:
    made = await engine.create_token("admin", scopes=["admin"])

    for command in (("tokens", "create", "x", "--scope", "read"), ("ls",)):
        refused = await ran(url, *command, "--namespace", "", token=made.token)
        assert refused.status == 2, refused
        assert "namespace: must not be empty" in refused.err


def test_a_server_that_is_away_is_no_refusal() -> None:
    away = run("ls", url="http://127.0.0.1:1")

    assert away.status == 5
    assert "cannot be reached" in away.err
