"""Ctrl-C while the command is still being loaded, and while it waits."""

import asyncio
import signal
import subprocess
import sys
from asyncio import create_subprocess_exec
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from flowfabric import Engine
from flowfabric.core.creation import NewExecution
from flowfabric.core.ids import uuid_of
from tests.cli.command import COMMAND, environment, heed_interrupts, run_on_terminal

SOURCE = Path(__file__).parent.parent.parent / "src" / "flowfabric_command.py"

# Stands in for a package whose import somebody interrupts. Whoever runs the tests in the
# background may have had interrupts ignored from the start.
INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
"""


def test_an_interrupt_during_the_start_ends_the_command_without_a_word(tmp_path: Path) -> None:
    package = tmp_path / "flowfabric"
    package.mkdir()
    (package / "__init__.py").write_text(INTERRUPTED)
    (tmp_path / SOURCE.name).write_text(SOURCE.read_text())
    done = subprocess.run(
        [sys.executable, "-c", "import flowfabric_command; flowfabric_command.main()"],
        cwd=tmp_path,
        env=environment({}) | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_command_tells_its_version() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", "import flowfabric_command; flowfabric_command.main()"),
            "--version",
        ],
        env=environment({}),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "flowfabric,")


async def test_an_interrupt_of_a_wait_leaves_the_id_of_what_goes_on(
    engine: Engine, url: str
) -> None:
    process = await create_subprocess_exec(
        *COMMAND, "submit", "work", "--wait", "1h",
        env=environment({"FLOWFABRIC_URL": url}), stderr=PIPE, preexec_fn=heed_interrupts,
    )  # fmt: skip
    assert process.stderr is not None
    async with asyncio.timeout(60):
        told = (await process.stderr.readline()).decode()
        process.send_signal(signal.SIGINT)
        _, rest = await process.communicate()
    (found,) = (await engine.find_executions()).executions
    assert (process.returncode, rest.strip()) == (130, b"")
    assert told == f"waiting for {uuid_of(found.execution_id)}\n"


@pytest.mark.parametrize("verb", ["cancel", "replay"])
async def test_an_interrupt_at_the_question_ends_the_command(
    engine: Engine, url: str, verb: str
) -> None:
    made = await engine.create_execution(NewExecution(execution_kind="mail"))
    if verb == "replay":
        await engine.cancel_execution(made.execution_id, reason="no")
    ran = await asyncio.to_thread(
        run_on_terminal,
        (*COMMAND, verb, "--lane", "default"),
        interrupt_at="[y/N]",
        timeout_s=15,
        FLOWFABRIC_URL=url,
    )
    asked = f"{verb.capitalize()} 1 execution? [y/N]:"
    assert (ran.status, ran.out.splitlines()[-1].strip()) == (130, asked)
