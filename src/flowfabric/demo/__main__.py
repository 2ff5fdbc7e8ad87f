"""Plays the demonstration: `python -m flowfabric.demo [FILE]`."""

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from rich.text import Text

from flowfabric.demo.program import app
from flowfabric.demo.scenes import SCENES
from flowfabric.demo.stage import Stage
from flowfabric.terminal import Console, open_console

FILE: Final = "flowfabric-demo.db"


async def play(path: Path, console: Console) -> None:
    """Play every scene on a new database at `path`, and leave it behind."""
    for old in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
        old.unlink(missing_ok=True)
    url = f"sqlite:///{path}"
    app.url = url
    started = time.monotonic()
    console.print(Text("FlowFabric: functions that survive crashes", style="bold"))
    console.print(Text(f"Everything happens in one SQLite file: {path}", style="dim"))
    with tempfile.TemporaryDirectory(prefix="flowfabric-demo-") as folder:
        async with app:
            stage = Stage(app.engine, url, Path(folder) / "journal", console)
            try:
                for scene in SCENES:
                    await scene(stage)
            finally:
                stage.stop_workers()
    console.print()
    console.rule(Text("What is left", style="bold"), align="left", style="dim")
    took_s = time.monotonic() - started
    console.print(f"Done in {took_s:.0f} s. The file is yours to look at:")
    for command in ("ls", "ls --kind publish --json", "flow ls", "events", "doctor"):
        line = f"  {command_name()} {command} --url {url}"
        console.print(Text(line, style="cyan"), soft_wrap=True)


def command_name() -> str:
    """How to call `flowfabric` from here: it may lie in an environment that is not active."""
    if shutil.which("flowfabric"):
        return "flowfabric"
    beside = Path(sys.executable).with_name("flowfabric")
    if not beside.exists():
        return f"{sys.executable} -m flowfabric.cli"
    return str(beside.relative_to(Path.cwd()) if beside.is_relative_to(Path.cwd()) else beside)


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else FILE)
    console = open_console()
    try:
        asyncio.run(play(path, console))
    except KeyboardInterrupt:
        console.print()
        console.print("Interrupted; the workers are stopped.")
        sys.exit(130)


if __name__ == "__main__":
    main()
