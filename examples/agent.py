"""An agent: a model chooses tools, and a person has to allow the dangerous ones.

    flowfabric worker examples.agent:app
    flowfabric submit assist '{"request": "clean up"}' --app examples.agent:app
    flowfabric signal ID decision --payload '{"allow": true}' --app examples.agent:app

Each call of the model and of a tool is a step: it is paid for once, whatever
crashes, and the conversation continues from what is stored. `think` stands for
a model; put a call of yours there.
"""

import os
from pathlib import Path
from typing import Final

from msgspec import Struct

from flowfabric import App, Context

app = App(os.environ.get("FLOWFABRIC_URL", "sqlite:///agent.db"))
journal = Path(os.environ.get("JOURNAL", "agent.log"))

DANGEROUS: Final = {"delete_files"}
TURNS_MAX: Final = 10


class Move(Struct, frozen=True):
    """What the model wants next: a tool, or to say something and stop."""

    tool: str | None
    text: str


class Decision(Struct, frozen=True):
    """What the person asked for permission answers."""

    allow: bool
    reason: str = ""


def think(request: str, seen: list[str]) -> Move:
    """The model: looks first, then wants to delete, then reports."""
    note(f"think {len(seen)}")
    script = [Move("list_files", "/tmp"), Move("delete_files", "/tmp/old"), Move(None, "done")]
    return script[len(seen)] if len(seen) < 2 else Move(None, f"{request}: {seen[-1]}")


def list_files(folder: str) -> str:
    note("list_files")
    return f"{folder}/old, {folder}/new"


def delete_files(pattern: str) -> str:
    note("delete_files")
    return f"deleted {pattern}"


def note(line: str) -> None:
    with journal.open("a") as file:
        file.write(f"{line}\n")


TOOLS: Final = {"list_files": list_files, "delete_files": delete_files}


@app.task
async def assist(ctx: Context, request: str) -> str:
    seen: list[str] = []
    for _ in range(TURNS_MAX):
        move = await ctx.step("think", think, request, seen)
        if move.tool is None:
            return move.text
        if move.tool in DANGEROUS:
            await ctx.progress(message=f"asks to {move.tool} {move.text}")
            answer = await ctx.wait_for_signal("decision", type=Decision, timeout="7d")
            if not answer.payload.allow:
                seen.append(f"not allowed by {answer.source}: {answer.payload.reason}")
                continue
        seen.append(await ctx.step(move.tool, TOOLS[move.tool], move.text))
    return "it came to no end"
