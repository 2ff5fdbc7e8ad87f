"""The real command, in pipes: what scripts get."""

import asyncio
import json
import socket
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from shlex import quote

import click
import pytest

from flowfabric import Engine
from flowfabric.cli.main import cli
from flowfabric.core.creation import NewExecution
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.states import EligibilityState, FailureClass, LaneState, PublicState
from tests.cli.command import COMMAND, environment, run
from tests.conformance.auditing import spoil


async def create(engine: Engine, **fields: str) -> str:
    request = NewExecution(
        execution_kind=fields.get("kind", "work"),
        lane_id=fields.get("lane", "default"),
        input_payload=fields.get("payload", "").encode(),
    )
    return (await engine.create_execution(request)).execution_id


async def fail(engine: Engine, reason: str) -> str:
    execution_id = await create(engine, kind="failing")
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1", kinds=["failing"])
    assert claimed is not None
    await engine.fail(claimed.handle, reason, failure_class=FailureClass.PERMANENT)
    return execution_id


# Which database, and what when there is none


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--cors-origin", "app.example", "must be an origin, such as https://example.org"),
        ("--cors-origin", "https://app.example/", "must be an origin, such as https://example.org"),
        ("--trusted-proxy", "nonsense", "must be an address or a network, such as 10.0.0.0/8"),
    ],
)
def test_a_server_refuses_origins_and_proxies_that_can_never_match(
    option: str, value: str, says: str
) -> None:
    refused = run("serve", option, value, url="sqlite:///never.db")
    assert refused.status == 2
    assert says in " ".join(refused.err.split())


def test_a_server_without_a_database_or_a_port_says_so_and_fails(tmp_path: Path) -> None:
    missing = run("serve", "--port", "0", url=f"sqlite:///{tmp_path}/missing.db")
    assert missing.status == 5
    assert missing.err.startswith("Error: sqlite: there is no database at ")
    assert "Traceback" not in missing.err
    url = f"sqlite:///{tmp_path}/there.db"
    assert run("migrate", url=url).status == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = run("serve", "--port", str(port), url=url)
    assert refused.status == 5
    assert f"Error: serve: cannot listen at 127.0.0.1:{port}; the log says why" in refused.err
    other = run("serve", "--port", "0", url="http://127.0.0.1:1")
    assert other.status == 2
    assert "--url: must be the database" in other.err


def test_without_a_database_it_says_how_to_name_one() -> None:
    ran = run("ls")
    assert ran.status == 2
    assert "--url" in ran.err
    assert "FLOWFABRIC_URL" in ran.err
    assert ran.out == ""


def test_a_missing_file_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "missing.db"
    ran = run("ls", "--url", f"sqlite:///{path}")
    assert ran.status == 5
    assert f"flowfabric migrate --url sqlite:///{path}" in ran.err
    assert not path.exists()
    assert "Traceback" not in ran.err


def test_a_path_with_encoded_characters_is_found_once_it_exists(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/two%20words.db"
    assert run("migrate", "--url", url).status == 0

    assert run("ls", "--url", url).status == 0


def test_a_url_of_an_unknown_kind_is_bad_usage() -> None:
    ran = run("ls", "--url", "mysql://localhost/x")
    assert (ran.status, ran.out) == (2, "")
    assert "sqlite:///" in ran.err


def test_an_unreachable_database_is_unavailable() -> None:
    ran = run("ls", "--url", "postgresql://nobody:secret@127.0.0.1:1/nothing")
    assert ran.status == 5
    assert ran.err.startswith("Error: ")
    assert "cannot be reached: 127.0.0.1:1: " in ran.err
    assert "secret" not in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, " * 1_000)
    ran = run("ls", "--url", f"sqlite:///{path}")
    assert ran.status == 5
    assert "Traceback" not in ran.err


def test_errors_are_json_with_json() -> None:
    ran = run("ls", "--json", "--url", "mysql://localhost/x")
    assert ran.out == ""
    assert json.loads(ran.err)["error"]["code"] == "invalid_input"
    assert json.loads(run("ls", "--json").err)["error"]["code"] == "usage"


def test_an_unmigrated_postgres_says_which_command_to_run(empty_postgres_database: str) -> None:
    ran = run("ls", url=empty_postgres_database)
    assert ran.status == 5
    assert f"run: flowfabric migrate --url {quote(empty_postgres_database)}" in ran.err

    assert run("migrate", "--check", url=empty_postgres_database).status == 4
    migrated = run("migrate", "--json", url=empty_postgres_database)
    assert migrated.status == 0
    applied = migrated.document["applied"]
    assert isinstance(applied, list)
    assert applied[0] == "0001_executions"
    assert run("migrate", "--check", url=empty_postgres_database).status == 0
    assert run("migrate", "--json", url=empty_postgres_database).document == {"applied": []}
    assert run("submit", "work", url=empty_postgres_database).status == 0
    assert len(run("ls", "--json", url=empty_postgres_database).documents) == 1


# Seeing


async def test_ls_prints_one_document_per_line_newest_first(engine: Engine, url: str) -> None:
    ids = [await create(engine) for _ in range(3)]
    ran = run("ls", "--json", url=url)
    assert (ran.status, ran.err) == (0, "")
    assert {each["execution_id"] for each in ran.documents} == set(ids)
    assert [each["execution_id"] for each in run("ls", "--json", "-n", "1", url=url).documents] == [
        ran.documents[0]["execution_id"]
    ]


async def test_ls_filters(engine: Engine, url: str) -> None:
    mail = await create(engine, lane="mail")
    failed = await fail(engine, "boom")
    await engine.set_execution_tag(mail, "app.team", "sport")

    def found(*arguments: str) -> set[object]:
        return {each["execution_id"] for each in run("ls", "--json", *arguments, url=url).documents}

    assert found("--lane", "mail") == {mail}
    assert found("--state", "failed") == {failed}
    assert found("--state", "failed", "--state", "waiting") == {failed, mail}
    assert found("--kind", "failing") == {failed}
    assert found("--tag", "app.team=sport") == {mail}
    assert found("--since", "1h") == {failed, mail}
    assert found("--before", "1h") == set()
    assert found("--since", "2020-01-01", "--before", "2020-01-02T00:00+01:00") == set()
    assert found("--namespace", "elsewhere") == set()


def test_ls_refuses_what_makes_no_sense(url: str) -> None:
    assert run("migrate", url=url).status == 0
    for arguments in (("--state", "happy"), ("--since", "soon"), ("--tag", "x"), ("-n", "0")):
        ran = run("ls", *arguments, url=url)
        assert (ran.status, ran.out) == (2, "")
        assert arguments[0] in ran.err or "--limit" in ran.err


async def test_show_finds_an_execution_by_parts_of_its_uuid(engine: Engine, url: str) -> None:
    execution_id = await create(engine, payload='{"to": "all"}')
    for part in (execution_id, execution_id[-36:], execution_id[-36:-10], execution_id[-12:]):
        ran = run("show", part, "--json", url=url)
        assert ran.status == 0, ran.err
        assert ran.document["execution_id"] == execution_id
        assert ran.document["payload"] == {"to": "all"}
        assert ran.document["attempts"] == []


@pytest.mark.parametrize(
    ("percent", "message", "shown"),
    [(40, None, "40%"), (None, "asks to delete", "asks to delete"), (40, "reads", "40%  reads")],
)
async def test_show_tells_how_far_a_run_is_in_percent_or_words(
    engine: Engine, url: str, percent: int | None, message: str | None, shown: str
) -> None:
    execution_id = await create(engine)
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    await engine.progress(claimed.handle, percent=percent, message=message)
    (line,) = (
        each for each in run("show", execution_id, url=url).lines if each.startswith("progress")
    )
    assert line.split(maxsplit=1)[1].rstrip() == shown


async def test_show_tells_missing_from_ambiguous_from_nonsense(engine: Engine, url: str) -> None:
    ids = [await create(engine) for _ in range(2)]
    shared = ids[0][-36:-28]
    assert ids[1][-36:-28] == shared, "uuids made within a minute begin alike"
    assert run("show", "ffffffff", url=url).status == 3
    ambiguous = run("show", shared, url=url)
    assert ambiguous.status == 2
    assert ids[0][-36:] in ambiguous.err
    assert run("show", "zzzz", url=url).status == 3
    assert run("show", "{fp:1}", url=url).status == 2
    unknown = "{fp:86}:00000000-0000-4000-8000-000000000000"
    for command in ("show", "why", "cancel", "replay", "revoke"):
        assert run(command, unknown, url=url).status == 3, command
    assert run("priority", unknown, "5", url=url).status == 3


async def test_why_says_it_in_a_sentence(engine: Engine, url: str) -> None:
    execution_id = await create(engine, lane="mail")
    await engine.pause_lane("mail")
    ran = run("why", execution_id, url=url)
    assert (ran.status, ran.out) == (
        0,
        "Its lane 'mail' is paused: resume the lane (flowfabric lanes resume mail).\n",
    )
    assert run("why", execution_id, "--json", url=url).document["cause"] == "lane_closed"


async def test_events_are_printed_in_order(engine: Engine, url: str) -> None:
    execution_id = await create(engine)
    await engine.cancel_execution(execution_id, reason="no")
    ran = run("events", "--json", url=url)
    assert [(each["category"], each["event_type"]) for each in ran.documents] == [
        ("completion", "cancelled")
    ]
    last = ran.documents[-1]["event_id"]
    assert run("events", "--json", "--after", str(last), url=url).out == ""


# Steering


async def test_submit_creates_what_it_is_told(engine: Engine, url: str) -> None:
    ran = run(
        "submit", "greet", '{"name": "Ada"}', "--lane", "mail", "--priority", "7", "--key", "k",
        "--tag", "app.a=1", "--delay", "10m", "--json", url=url,
    )  # fmt: skip
    assert ran.status == 0
    execution = await engine.describe_execution(str(ran.document["execution_id"]))
    assert execution is not None
    assert (execution.execution_kind, execution.lane_id, execution.priority, execution.tags) == (
        "greet", "mail", 7, {"app.a": "1"},
    )  # fmt: skip
    assert execution.public_state is PublicState.DELAYED
    again = run("submit", "greet", '{"name": "Ada"}', "--key", "k", "--json", url=url)
    assert again.document == {"execution_id": execution.execution_id, "created": False}


async def test_submit_reads_standard_input(engine: Engine, url: str) -> None:
    ran = run("submit", "greet", "--file", "-", url=url, stdin="[1, 2]")
    context = await engine.read_execution_context(ran.out.strip())
    assert context.input_payload == b"[1, 2]"


@pytest.mark.parametrize("wait", ["50ms", "1"])
def test_submit_gives_up_waiting(url: str, wait: str) -> None:
    assert run("migrate", url=url).status == 0
    ran = run("submit", "nobody-does-this", "--wait", wait, url=url)
    assert ran.status == 5
    assert "No running worker has a task" in ran.err


async def test_cancel_by_id(engine: Engine, url: str) -> None:
    ids = [await create(engine) for _ in range(2)]
    ran = run("cancel", ids[0], ids[1][-12:], "--reason", "enough", url=url)
    assert (ran.status, ran.out) == (0, "2 cancelled\n")
    execution = await engine.describe_execution(ids[1])
    assert execution is not None
    assert execution.cancellation_reason == "enough"


async def test_cancel_what_has_ended_is_refused(engine: Engine, url: str) -> None:
    execution_id = await fail(engine, "boom")
    told = run("cancel", execution_id, url=url).err
    assert "1 refused: 1 already ended" in told
    assert "nothing to cancel; `replay` would run it again" in told
    ran = run("cancel", execution_id, "--json", url=url)
    assert ran.status == 4
    refused = ran.document["refused"]
    assert isinstance(refused, dict)
    assert list(refused) == [execution_id]
    assert ran.document["cancelled"] == 0


async def test_bulk_cancel_wants_to_be_sure(engine: Engine, url: str) -> None:
    for _ in range(3):
        await create(engine, lane="mail")
    kept = await create(engine)
    assert run("cancel", "--yes", url=url).status == 2
    unsure = run("cancel", "--lane", "mail", url=url)
    assert unsure.status == 2
    assert "3 executions" in unsure.err
    assert "--yes" in unsure.err
    ran = run("cancel", "--lane", "mail", "--state", "waiting", "--yes", "--json", url=url)
    assert (ran.status, ran.document) == (0, {"cancelled": 3, "refused": {}})
    assert await engine.read_execution_state(kept) is PublicState.WAITING
    assert run("cancel", "--state", "failed", "--yes", url=url).status == 2


async def test_of_several_ids_those_that_exist_are_cancelled(engine: Engine, url: str) -> None:
    known = await create(engine)
    ran = run("cancel", "zzzz", known, "yyyy", url=url)
    assert (ran.status, ran.out) == (1, "1 cancelled\n")
    assert await engine.read_execution_state(known) is PublicState.CANCELLED
    assert ran.err.splitlines() == [
        "2 refused: 2 not found",
        "  zzzz  execution not found: zzzz",
        "  yyyy  execution not found: yyyy",
    ]
    ran = run("revoke", "zzzz", "yyyy", "--json", url=url)
    refused = {
        each: {"code": "not_found", "message": f"execution not found: {each}"}
        for each in ("zzzz", "yyyy")
    }
    assert (ran.status, ran.document) == (3, {"revoked": 0, "refused": refused})
    assert run("revoke", known, "zzzz", url=url).status == 4


async def test_bulk_replay_leaves_successes_alone_unless_named(engine: Engine, url: str) -> None:
    failed = await fail(engine, "boom")
    done = await create(engine, kind="failing")
    claimed = await engine.claim(worker_id="w", worker_instance_id="w-1")
    assert claimed is not None
    await engine.complete(claimed.handle)
    ran = run("replay", "--kind", "failing", "--yes", "--json", url=url)
    assert ran.document == {"replayed": 1, "refused": {}}
    assert await engine.read_execution_state(failed) is PublicState.WAITING
    assert await engine.read_execution_state(done) is PublicState.COMPLETED


async def test_priority_and_revoke(engine: Engine, url: str) -> None:
    execution_id = await create(engine)
    assert run("priority", execution_id, "900", "--json", url=url).document == {
        "execution_id": execution_id,
        "priority": 900,
    }
    assert run("revoke", execution_id, url=url).status == 4
    await engine.claim(worker_id="w", worker_instance_id="w-1")
    ran = run("revoke", execution_id, url=url)
    assert (ran.status, ran.out) == (0, "1 revoked\n")
    assert run("priority", execution_id, "high", url=url).status == 2


async def test_lanes(engine: Engine, url: str) -> None:
    await create(engine, lane="mail")
    for verb, state in (("pause", "paused"), ("drain", "draining"), ("resume", "active")):
        assert run("lanes", verb, "mail", "--json", url=url).document["state"] == state
    listed = run("lanes", "list", "--json", url=url).documents
    assert [(each["lane_id"], each["state"]) for each in listed] == [
        ("default", LaneState.ACTIVE),
        ("mail", LaneState.ACTIVE),
    ]
    assert run("lanes", "resume", "unknown", url=url).status == 3


async def test_schedules(engine: Engine, url: str) -> None:
    await engine.upsert_schedule(
        ScheduleDefinition(schedule_id="nightly", execution_kind="report", cron="0 3 * * *")
    )
    listed = run("schedules", "list", "--json", url=url).documents
    assert [each["schedule_id"] for each in listed] == ["nightly"]
    assert run("schedules", "pause", "nightly", "--json", url=url).document["paused"] is True
    assert run("schedules", "resume", "nightly", "--json", url=url).document["paused"] is False
    created = run("schedules", "run", "nightly", url=url).out.strip()
    assert await engine.read_execution_state(created) is PublicState.WAITING
    assert run("schedules", "remove", "nightly", url=url).status == 0
    assert run("schedules", "remove", "nightly", url=url).status == 3


# The rest


async def test_doctor_says_what_is_wrong(engine: Engine, url: str) -> None:
    fine = run("doctor", "--json", url=url)
    assert fine.status == 0
    findings = fine.document["findings"]
    assert isinstance(findings, list)
    assert {each["check"]: each["verdict"] for each in findings} == {
        "package": "fine",
        "database": "fine",
        "latency": "fine",
        "clock": "fine",
        "wake-ups": "fine",
        "workers": "warning",
        "timers": "fine",
        "lanes": "fine",
        "audit": "fine",
    }
    missing = run("doctor", url=url.replace("flowfabric.db", "missing.db"))
    assert missing.status == 5
    assert "✗ database" in missing.out


async def test_doctor_finds_what_nothing_moves(engine: Engine, url: str) -> None:
    stuck = await create(engine)
    await spoil(
        engine,
        stuck,
        ready=False,
        eligibility_state=EligibilityState.BLOCKED_BY_DEPENDENCIES,
    )
    ran = run("doctor", url=url)
    assert ran.status == 1
    assert "✗ audit" in ran.out
    assert stuck[-12:] in ran.out
    assert "nothing will move it: cancel it" in ran.out


def test_passwords_are_not_shown() -> None:
    ran = run("doctor", "--url", "postgresql://me:secret@127.0.0.1:1/x")
    assert ran.status == 5
    assert "me:***@127.0.0.1:1" in ran.out
    assert "secret" not in ran.out + ran.err


def test_bench_measures_on_a_database_of_its_own() -> None:
    ran = run("bench", "--count", "200", "--json")
    assert ran.status == 0
    measured = ran.document["measured"]
    assert isinstance(measured, list)
    assert [(each["what"], each["count"]) for each in measured] == [
        ("create", 200),
        ("claim and complete", 200),
        ("whole lives, one by one", 200),
    ]
    assert all(each["per_second"] > 0 for each in measured)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_line_for_the_shell(shell: str) -> None:
    ran = run("completion", shell)
    assert ran.status == 0
    assert f"_FLOWFABRIC_COMPLETE={shell}_source flowfabric" in ran.out


def test_every_command_understands_json() -> None:
    def commands(group: click.Group) -> Iterator[click.Command]:
        for command in group.commands.values():
            if isinstance(command, click.Group):
                yield from commands(command)
            else:
                yield command

    without = [
        command.name
        for command in commands(cli)
        if not any("--json" in parameter.opts for parameter in command.params)
    ]
    assert without == []
    assert run("completion", "zsh", "--json").document["file"] == "~/.zshrc"


def test_the_help_tells_every_way_to_name_the_database() -> None:
    told = " ".join(run("--help").out.split())
    for way in ("--url", "FLOWFABRIC_URL", "--app", "FLOWFABRIC_APP"):
        assert way in told


def test_the_shell_is_told_what_can_follow() -> None:
    ran = run(_FLOWFABRIC_COMPLETE="bash_complete", COMP_WORDS="flowfabric ca", COMP_CWORD="1")
    assert ran.out.split() == ["plain,cancel"]
    ran = run(
        _FLOWFABRIC_COMPLETE="bash_complete", COMP_WORDS="flowfabric ls --state fa", COMP_CWORD="3"
    )
    assert ran.out.split() == ["plain,failed"]


def test_nonsense_is_bad_usage() -> None:
    assert run("frobnicate").status == 2
    assert run("ls", "--frobnicate").status == 2
    assert run("show").status == 2
    assert run("--version").status == 0
    assert run("--help").status == 0
    assert run("--url", "x", "ls").status == 2


async def test_whoever_reads_only_the_first_line_causes_no_error(engine: Engine, url: str) -> None:
    await engine.create_executions([NewExecution(execution_kind="work") for _ in range(1_000)])
    pipeline = 'set -o pipefail; "$@" | head -n 1'
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", pipeline, "bash", *COMMAND, "ls", "--json", "-n", "1000",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment({"FLOWFABRIC_URL": url}),
    )  # fmt: skip
    out, err = await process.communicate()
    assert (len(out.splitlines()), err, process.returncode) == (1, b"", 0)


def test_an_app_names_the_database(tmp_path: Path, exercised_store: Callable[[str], None]) -> None:
    exercised_store("sqlite file")
    (tmp_path / "shop.py").write_text(
        "from flowfabric import App\napp = App('sqlite:///shop.db')\n"
    )
    (tmp_path / "broken.py").write_text("import missing_package\n")
    assert run("migrate", "--app", "shop:app", cwd=tmp_path).status == 0
    assert run("ls", cwd=tmp_path, FLOWFABRIC_APP="shop:app").status == 0
    assert (tmp_path / "shop.db").exists()
    assert "did you mean shop:app?" in run("ls", "--app", "shop:ap", cwd=tmp_path).err
    for reference in ("shop", "shop:missing", "missing:app", "shop:App.url"):
        ran = run("ls", "--app", reference, cwd=tmp_path)
        assert ran.status == 2, reference
        assert "Traceback" not in ran.err
    broken = run("ls", "--app", "broken:app", cwd=tmp_path)
    assert broken.status == 1
    assert "missing_package" in broken.err


@pytest.mark.parametrize("said", ["3", "0", "'missing ENV'"])
@pytest.mark.parametrize("command", ["ls", "worker"])
def test_a_program_that_exits_while_it_is_imported_is_not_done(
    tmp_path: Path, command: str, said: str
) -> None:
    (tmp_path / "quitting.py").write_text(f"import sys\nsys.exit({said})\n")
    at = ["quitting:app"] if command == "worker" else ["--app", "quitting:app"]
    ran = run(command, *at, cwd=tmp_path)
    assert ran.status == 1
    assert f"quitting:app cannot be imported: SystemExit: {said.strip(chr(39))}" in ran.err


@pytest.mark.parametrize(
    "command",
    [("ls",), ("why", "0123"), ("lanes", "list"), ("doctor",), ("migrate", "--check")],
    ids=" ".join,
)
def test_commands_that_look_do_not_migrate_a_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table theirs (id integer)")
    connection.close()
    before = path.read_bytes()

    ran = run(*command, url=f"sqlite:///{path}")

    assert ran.status != 0
    assert "migrate" in ran.out + ran.err
    assert path.read_bytes() == before
