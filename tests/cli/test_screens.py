"""The real command on a terminal: what people see."""

import os
import subprocess

import pytest

from flowfabric import Engine
from flowfabric.cli.executions import ended_at_ms
from flowfabric.cli.screen import REMARK, ScreenColumn, fit, fixed, flexible, right, spare, whole
from flowfabric.core.budget_terms import BudgetDefinition
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Step, StepKind
from flowfabric.core.schedules import ScheduleDefinition
from flowfabric.core.states import FailureClass
from flowfabric.core.views import step_view
from tests.cli.command import COMMAND, run_on_terminal

REASON = "HTTPStatusError: Server error '503 Service Unavailable' for url 'https://example.org/p'"
KIND = "import_products_from_the_catalogue_of_a_supplier"


@pytest.fixture
async def failed_id(engine: Engine) -> str:
    created = await engine.create_execution(
        NewExecution(execution_kind=KIND, input_payload=b'{"page": 41}')
    )
    claimed = await engine.claim(worker_id="w", worker_instance_id="worker-host-4711")
    assert claimed is not None
    await engine.fail(claimed.handle, REASON, failure_class=FailureClass.PERMANENT)
    return created.execution_id


@pytest.mark.parametrize("columns", [60, 80, 100, 132, 200])
async def test_the_list_fits_the_terminal_one_line_per_execution(
    engine: Engine, url: str, failed_id: str, columns: int
) -> None:
    await engine.create_execution(NewExecution(execution_kind="short", lane_id="mail"))
    ran = run_on_terminal((*COMMAND, "ls", "--url", url), columns=columns)
    assert ran.status == 0
    header, newest, oldest = ran.lines
    assert header.split() == ["KIND", "ID", "STATE", "LANE", "TRY", "AGE"]
    assert max(len(line) for line in ran.lines) <= columns
    assert newest.split()[:1] + newest.split()[2:4] == ["short", "waiting", "mail"]
    kind, shown_id, state = oldest.split()[:3]
    assert failed_id.endswith(shown_id)
    assert len(shown_id) == (36 if columns >= 132 else 12)
    assert state == "failed"
    assert KIND.startswith(kind.removesuffix("…"))
    if columns >= 80:
        assert len(kind) >= 20
        assert "HTTPStatus" in oldest
    assert "\x1b[1;31mfailed" in ran.err, "failures are bold and red"


def test_a_list_can_be_printed_wherever_it_goes(url: str, failed_id: str) -> None:
    """Into a stream that has only ASCII, on a terminal that does not know its width."""
    extra = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": "0"}
    ran = subprocess.run(
        (*COMMAND, "ls", "--url", url), env={**os.environ, **extra}, capture_output=True
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert failed_id[-12:].encode() in ran.stdout


@pytest.mark.parametrize("chars", [36, 58, 256])
async def test_a_long_id_leaves_room_for_the_rest(engine: Engine, url: str, chars: int) -> None:
    own_id = ("customer-4711/" * 20)[: chars - 4] + "0042"
    await engine.create_execution(NewExecution(execution_kind="approve", execution_id=own_id))
    await engine.create_execution(NewExecution(execution_kind="approve"))
    ran = run_on_terminal((*COMMAND, "ls", "--url", url), columns=80)
    # Both may have been created in one millisecond, and then either comes first.
    other, named = sorted(ran.lines[1:], key=lambda line: "0042" in line)
    kind, shown_id, *rest = named.split()
    assert (kind, rest[:3]) == ("approve", ["waiting", "default", "0"])
    assert named.endswith("no worker")
    head, tail = shown_id.split("…")
    assert own_id.startswith(head)
    assert own_id.endswith(tail)
    assert tail.endswith("0042")
    assert len(other.split()[1]) == 12


async def test_show_tells_the_whole_story(url: str, failed_id: str) -> None:
    ran = run_on_terminal((*COMMAND, "show", failed_id[-12:], "--url", url), columns=100)
    assert ran.status == 0
    text = " ".join(ran.out.split())
    assert ran.lines[0].split() == [KIND, "failed"]
    for expected in (
        f"It failed: {REASON}.",
        failed_id,
        '{"page":41}',
        "worker-host-4711",
        "ended failure",
    ):
        assert expected in text
    assert max(len(line) for line in ran.lines) <= 100


async def test_bulk_operations_ask_on_a_terminal(engine: Engine, url: str) -> None:
    for _ in range(2):
        await engine.create_execution(NewExecution(execution_kind="work"))
    command = (*COMMAND, "cancel", "--state", "waiting", "--url", url)
    declined = run_on_terminal(command, typed="n\n")
    assert declined.status == 130
    assert "Cancel 2 executions? [y/N]" in declined.out
    agreed = run_on_terminal(command, typed="y\n")
    assert agreed.status == 0
    assert "2 cancelled" in agreed.out


async def test_schedules_fit_the_terminal(engine: Engine, url: str) -> None:
    await engine.upsert_schedule(
        ScheduleDefinition(
            schedule_id="a_schedule_with_quite_a_long_name",
            execution_kind="a_task_with_quite_a_long_name",
            cron="0,15,30,45 6-18 1-15 * 1-5",
            timezone="America/Argentina/Buenos_Aires",
        )
    )
    ran = run_on_terminal((*COMMAND, "schedules", "list", "--url", url))
    header, row = ran.lines
    assert header.split() == ["SCHEDULE", "WHEN", "NEXT", "LAST", "FIRED", "KIND"]
    assert len(row) <= 80


async def test_a_long_name_of_a_schedule_leaves_its_times_readable(
    engine: Engine, url: str
) -> None:
    await engine.upsert_schedule(
        ScheduleDefinition(schedule_id="n" * 70, execution_kind="reminders", every_ms=600_000)
    )
    _, row = run_on_terminal((*COMMAND, "schedules", "list", "--url", url)).lines
    name, every, span, *_, kind = row.split()
    assert (every, span, kind) == ("every", "10m", "reminders")
    assert name.endswith("n…")
    assert len(row) <= 80


async def test_an_empty_list_says_so(engine: Engine, url: str) -> None:
    ran = run_on_terminal((*COMMAND, "ls", "--url", url))
    assert (ran.status, ran.out.strip()) == (0, "No executions match.")


COLUMNS = (fixed("ID"), flexible("KIND"), right("AGE"), REMARK)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        pytest.param(100, [12, 30, 6, 40], id="everything fits"),
        pytest.param(80, [12, 30, 6, 26], id="the remark gives way first"),
        pytest.param(60, [12, 16, 6, 20], id="then other columns"),
        pytest.param(40, [12, 5, 6, 11], id="then the remark again"),
        pytest.param(30, [12, 5, 6, 0], id="at last the remark is left out"),
    ],
)
def test_what_gives_way_when_room_is_short(width: int, expected: list[int]) -> None:
    columns: tuple[ScreenColumn, ...] = COLUMNS
    assert fit(columns, [12, 30, 6, 40], width) == expected


def test_a_column_keeps_the_room_it_needs_before_the_remark() -> None:
    columns = (flexible("KIND", at_least=20), fixed("ID"), flexible("LANE"), REMARK)
    assert fit(columns, [30, 12, 10, 40], 60) == [20, 12, 5, 17]
    assert fit(columns, [8, 12, 10, 40], 50) == [8, 12, 5, 19]
    assert fit(columns, [30, 12, 10, 40], 30) == [9, 12, 5, 0]


def test_a_name_is_cut_only_once_everything_else_has_given_way() -> None:
    columns = (whole("BUDGET"), flexible("WHEN"), spare("SOFT"), right("HARD"), spare("RESET"))
    natural = [30, 10, 6, 6, 20]
    assert fit(columns, natural, 80) == [30, 10, 6, 6, 20]
    assert fit(columns, natural, 75) == [30, 5, 6, 6, 20]
    assert fit(columns, natural, 70) == [30, 5, 6, 6, 0]
    assert fit(columns, natural, 50) == [30, 5, 0, 6, 0]
    assert fit(columns, natural, 40) == [25, 5, 0, 6, 0]


NAME = "a-team-with-quite-a-long-name"


async def test_budgets_keep_their_names_on_a_narrow_terminal(engine: Engine, url: str) -> None:
    terms = BudgetDefinition(
        budget_id=NAME,
        hard_limits={"output_tokens": 1_000_000_000},
        soft_limits={"output_tokens": 800_000_000},
        reset_interval_ms=86_400_000,
    )
    await engine.create_budget(terms)
    ran = run_on_terminal((*COMMAND, "budgets", "list", "--url", url), columns=80)
    assert [line.split() for line in ran.lines] == [
        ["BUDGET", "DIMENSION", "USED", "HARD", "STATE"],
        [NAME, "output_tokens", "0", "1,000,000,000", "open"],
    ]


async def test_limits_lanes_and_workers_keep_their_names_on_a_narrow_terminal(
    engine: Engine, url: str
) -> None:
    await engine.set_limit(NAME, window_ms=60_000, max_requests_per_window=1_000)
    await engine.create_execution(NewExecution(execution_kind="work", lane_id=NAME))
    await engine.register_worker(
        [NAME],
        worker_id="w",
        worker_instance_id=NAME,
        kinds=["a_task_with_quite_a_long_name", "another"],
        liveness_ttl_ms=60_000,
    )
    for what in ("limits", "lanes", "workers"):
        ran = run_on_terminal((*COMMAND, what, "list", "--url", url), columns=80)
        assert ran.lines[1].split()[0] == NAME
        assert max(map(len, ran.lines)) <= 80


@pytest.mark.parametrize(
    ("wake_at_ms", "ended_ms"),
    [
        pytest.param(None, 100, id="a step ends when it is stored"),
        pytest.param(200, 200, id="a sleep is stored when it begins"),
        pytest.param(301, None, id="a sleep that goes on has not ended"),
    ],
)
def test_a_step_is_shown_with_when_it_ended(wake_at_ms: int | None, ended_ms: int | None) -> None:
    kind = StepKind.CALL if wake_at_ms is None else StepKind.SLEEP
    step = Step(
        partition_key=1, execution_id=ExecutionId("e"), step_key="s", kind=kind,
        recorded_at_ms=100, wake_at_ms=wake_at_ms, attempt_index=0
    )  # fmt: skip
    assert ended_at_ms(step_view(step), now_ms=300) == ended_ms
