"""What went through the app's codec, on the command line."""

import subprocess
import sys
from pathlib import Path

from tests.cli.command import run

PROGRAM = """
import asyncio
from flowfabric import App, Context

class Flipped:
    def encode(self, data: bytes) -> bytes:
        return data[::-1]

    def decode(self, data: bytes) -> bytes:
        return data[::-1]

app = App("sqlite:///{folder}/shop.db", codec=Flipped())

@app.task
async def hear(ctx: Context, said: str) -> str:
    await ctx.step("say", lambda: "in a step")
    return (await ctx.wait_for_signal("heard", type=str)).payload

async def main() -> None:
    async with app:
        stop = asyncio.Event()
        worker = asyncio.create_task(app.run_worker(stop=stop, signals=False))
        run = await app.submit(hear("as an argument"), execution_id="one")
        await run.signal("heard", "in a signal")
        await run.result("30s")
        stop.set()
        await worker

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_show_decodes_arguments_steps_and_signals(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(PROGRAM.replace("{folder}", str(tmp_path)))
    subprocess.run([sys.executable, "shop.py"], cwd=tmp_path, check=True, timeout=60)
    for options in ((), ("--json",)):
        shown = run("show", "one", "--app", "shop:app", *options, cwd=tmp_path).out
        for said in ("as an argument", "in a step", "in a signal"):
            assert said in shown
