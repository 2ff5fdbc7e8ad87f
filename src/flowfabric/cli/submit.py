"""`submit`: create an execution from the command line, and wait for it if asked to."""

import sys
import time
from contextlib import nullcontext
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import click
import msgspec
from rich.text import Text

from flowfabric.app import DEFAULT_NAMESPACE
from flowfabric.cli import options, screen
from flowfabric.core.bounds import PAYLOAD_DEPTH_MAX, PRIORITY_MAX, PRIORITY_MIN
from flowfabric.core.checks import JSON, check_key, split_kind, visible
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import ExecutionId, uuid_of
from flowfabric.core.results import Created
from flowfabric.core.states import TERMINAL_STATES, PublicState
from flowfabric.engine.engine import Engine
from flowfabric.engine.topics import COMPLETION_TOPIC
from flowfabric.errors import OperationTimeout
from flowfabric.run import Obstacles
from flowfabric.submission import Options, request_of
from flowfabric.task import Call, Task, TaskSettings
from flowfabric.terminal import block

LOOK_AGAIN_S: Final = 1.0


@click.command("submit", short_help="Create an execution, and wait for it if asked to.")
@click.argument("kind")
@click.argument("payload", required=False)
@click.option(
    "--file", "-f", "file", metavar="PATH", help="Read the payload from here; - for standard input."
)
@click.option("--encoding", default=JSON, show_default=True, help="How the payload is encoded.")
@click.option("--lane", help="Submit to this lane.  [default: that of the task, or `default`]")
@click.option(
    "--priority", type=click.IntRange(PRIORITY_MIN, PRIORITY_MAX), help="Higher goes first."
)
@click.option("--key", help="Idempotency key: the same key finds the same execution.")
@click.option("--id", "execution_id", help="Your own id: the same id finds the same execution.")
@click.option("--tag", "tags", multiple=True, metavar="KEY=VALUE", help="Tag it; repeatable.")
@click.option(
    "--delay", metavar="DURATION", help="Start it no sooner than after this, such as 10m."
)
@click.option("--policy", metavar="JSON", help="Retries, timeouts and the like.")
@click.option("--wait", metavar="DURATION", help="Wait this long for its end and print the result.")
@options.on_engine("own")
async def submit(
    engine: Engine,
    target: options.Target,
    kind: str,
    payload: str | None,
    file: str | None,
    encoding: str,
    lane: str | None,
    priority: int | None,
    key: str | None,
    execution_id: str | None,
    tags: tuple[str, ...],
    delay: str | None,
    policy: str | None,
    wait: str | None,
) -> int:
    """Create an execution of KIND with PAYLOAD, which is JSON.

    When --app names the database, the task must be one of that program: the payload is
    compared with its arguments, and its lane, retries and timeouts apply.

    Prints its id. With --wait: waits, prints the result, and exits with 1 if it failed. Ctrl-C
    ends the wait, not the execution.
    """
    data = _read_payload(payload, file)
    if data and encoding == JSON:
        _check_json(data)
    wait_ms = None if wait is None else options.duration_of("--wait", wait)
    chosen = Options(
        priority=priority,
        lane=lane,
        idempotency_key=check_key(key),
        execution_id=execution_id,
        tags=dict(options.pair(each) for each in tags),
        delay=delay,
    )
    request = _request(target, kind, data, chosen, encoding)
    if policy is not None:
        request = msgspec.structs.replace(request, policy=policy)
    created = await engine.create_execution(
        msgspec.structs.replace(request, creator_identity="cli")
    )
    called = execution_id or uuid_of(created.execution_id)
    if wait_ms is not None:
        if not target.json:
            # A user who ends the wait needs the id of what is still running.
            screen.err().print(Text(f"waiting for {called}", style="dim"))
        return await _await_end(engine, target, created.execution_id, called, wait_ms)
    new = isinstance(created, Created)
    if target.json:
        screen.emit({"execution_id": created.execution_id, "created": new})
    else:
        screen.out().print(Text(called))
        if not new:
            screen.err().print("[dim]It was there already: the key or id was used before.[/]")
    return options.OK


def _request(
    target: options.Target, kind: str, data: bytes, chosen: Options, encoding: str
) -> NewExecution:
    """The request that the program would make, if one is named; else only what was given."""
    namespace = target.scope() or DEFAULT_NAMESPACE
    task = None if target.app is None else _task_of(target.app, kind)
    if task is not None and encoding == JSON:
        task.arguments.decode(data)
        return request_of(Call(task, data or b"{}"), chosen, namespace)
    name, version = split_kind(kind)
    plain: Task[[], None] = Task(name, lambda: None, TaskSettings(), version)
    return msgspec.structs.replace(
        request_of(Call(plain, data), chosen, namespace),
        priority=chosen.priority,
        payload_encoding=encoding if data else None,
    )


def _task_of(reference: str, kind: str) -> Task[..., object]:
    app = options.find_app(reference)
    task = app.find_task(kind)
    if task is not None:
        return task
    close = get_close_matches(kind, app.tasks, 1)
    known = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(app.tasks))}."
    raise click.UsageError(
        f"{reference} has no task {kind!r}; {known} For a task of another program, give --url"
    )


def _check_json(data: bytes) -> None:
    try:
        msgspec.json.decode(data)
    except RecursionError:
        raise click.BadParameter(
            f"must be nested at most {PAYLOAD_DEPTH_MAX} deep", param_hint="PAYLOAD"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.BadParameter(
            f'is not JSON: {error}. Quote it for your shell, as in \'{{"name": "Ada"}}\'',
            param_hint="PAYLOAD",
        ) from None


def _read_payload(payload: str | None, file: str | None) -> bytes:
    if payload is not None and file is not None:
        raise click.UsageError("give either PAYLOAD or --file")
    if file == "-":
        return sys.stdin.buffer.read()
    if file is not None:
        try:
            return Path(file).read_bytes()
        except OSError as error:
            raise click.UsageError(f"cannot read {file}: {error.strerror}") from None
    return b"" if payload is None else payload.encode()


async def _await_end(
    engine: Engine, target: options.Target, execution_id: ExecutionId, called: str, wait_ms: int
) -> int:
    deadline = time.monotonic() + wait_ms / 1_000
    # With --json, the error of a wait that was too short says it.
    obstacles = (
        nullcontext()
        if target.json
        else Obstacles(engine, target.tell_obstacle).waiting(execution_id)
    )
    with engine.store.hints([COMPLETION_TOPIC]) as hints, obstacles:
        while (state := await engine.read_execution_state(execution_id)) not in TERMINAL_STATES:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                sentence = target.sentence(await engine.explain_execution(execution_id))
                raise OperationTimeout(f"waiting for {called}", wait_ms, sentence)
            await hints.wait(min(left_s, LOOK_AGAIN_S))
    execution = await engine.describe_execution(execution_id)
    assert execution is not None
    assert state is not None
    result = await engine.get_execution_result(execution_id)
    if target.json:
        screen.emit(
            {
                "execution_id": execution_id,
                "public_state": state,
                "result": result,
                "failure_reason": execution.failure_reason,
            }
        )
    elif state is PublicState.COMPLETED:
        screen.out().print(block(screen.shown(result, 10**9) or ""))
    else:
        ended = (await engine.find_outcomes([execution_id])).ended.get(execution_id)
        why = f": {ended.reason}" if ended is not None and ended.reason else ""
        screen.err().print(Text(visible(f"{called} is {state}{why}"), style="red"))
    return options.OK if state is PublicState.COMPLETED else options.FAILED
