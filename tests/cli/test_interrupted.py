"""Ctrl-C while the command is still being loaded."""

import subprocess
import sys
from pathlib import Path

from tests.cli.command import environment

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
