"""Whoever may submit work must not be able to act on the terminal of whoever looks at it."""

import json
import sqlite3

import pytest

from flowfabric import Engine
from flowfabric.core.conditions import Single
from flowfabric.core.creation import NewExecution
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.states import FailureClass
from tests.cli.command import COMMAND, run, run_on_terminal

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x9b31m\u202efdp\nforged line\r\u200b\u115f"
    "\u2028forged\u2029forged\x85forged"
)
ACTING = "\x07\x9b\u202e\u200b\u115f\u2028\u2029\x85"
COLUMNS = 400


@pytest.fixture
async def seeded(engine: Engine, url: str) -> list[str]:
    """A failed, a running and a waiting execution, and a schedule, with such text everywhere."""
    tags = {"note.text": HOSTILE}
    ids: list[str] = []
    for key in ("failed", "running", "waiting"):
        created = await engine.create_execution(
            NewExecution(
                execution_kind="work",
                idempotency_key=f"{key}{HOSTILE}",
                tags=tags,
                input_payload=json.dumps(HOSTILE).encode(),
            )
        )
        ids.append(created.execution_id)
        claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
        assert claimed is not None
        if key == "failed":
            await engine.fail(
                claimed.handle,
                HOSTILE,
                failure_class=FailureClass.PERMANENT,
                traceback=f"Traceback:\nValueError: {HOSTILE}",
            )
        elif key == "running":
            await engine.progress(claimed.handle, percent=5, message=HOSTILE)
        else:
            await engine.suspend(claimed.handle, resume_condition=Single("key"))
    await engine.upsert_schedule(
        ScheduleDefinition(schedule_id="tick", execution_kind="work", every_ms=60_000)
    )
    # Names are refused by now; what an older version let in is shown like any text.
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.execute("update schedule set schedule_id = ?", (HOSTILE,))
    connection.close()
    return ids


@pytest.mark.parametrize(
    "command",
    [
        ("ls",),
        ("show", "0"),
        ("show", "1"),
        ("why", "0"),
        ("why", "2"),
        ("waitpoints",),
        ("schedules", "list"),
        ("events",),
        ("ls", "--json"),
        ("show", "0", "--json"),
        ("events", "--json"),
        ("schedules", "list", "--json"),
    ],
    ids=" ".join,
)
async def test_text_from_the_database_is_shown_and_not_obeyed(
    url: str, seeded: list[str], command: tuple[str, ...]
) -> None:
    named = tuple(seeded[int(each)] if each.isdigit() else each for each in command)
    ran = run_on_terminal((*COMMAND, *named, "--url", url), columns=COLUMNS)

    assert ran.status == 0
    assert not set(ran.err) & set(ACTING)
    assert "\x1b]" not in ran.err
    assert "\x1b[2J" not in ran.err
    assert not any(line.startswith("forged") for line in ran.lines)


async def test_what_was_hidden_can_be_read(url: str, seeded: list[str]) -> None:
    ran = run_on_terminal((*COMMAND, "why", seeded[0], "--url", url), columns=COLUMNS)

    assert "\\x1b[2J\\x9b31m\\u202efdp\\nforged line" in ran.out


async def test_scripts_get_the_text_as_it_was_stored(url: str, seeded: list[str]) -> None:
    ran = run("show", seeded[0], "--json", url=url)

    assert ran.document["failure_reason"] == HOSTILE
    assert ran.document["tags"] == {"note.text": HOSTILE}
