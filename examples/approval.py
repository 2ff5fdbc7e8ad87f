"""A deployment that two people have to approve, and that asks louder when they do not.

    flowfabric worker examples.approval:app
    flowfabric submit deploy '{"version": "v2"}' --app examples.approval:app
    flowfabric waitpoints --app examples.approval:app
    flowfabric signal ID approved --source ada --app examples.approval:app
    flowfabric signal ID approved --source bob --app examples.approval:app

While it waits, nothing runs: workers can be stopped, replaced, killed.
"""

import os
from pathlib import Path

from flowfabric import App, Context, SignalTimeout, count

app = App(os.environ.get("FLOWFABRIC_URL", "sqlite:///approval.db"))
journal = Path(os.environ.get("JOURNAL", "approval.log"))


def note(line: str) -> str:
    """In place of the outside world: chat messages, the build, the cluster."""
    with journal.open("a") as file:
        file.write(f"{line}\n")
    return line


@app.task
async def deploy(ctx: Context, version: str, patience: str = "1h") -> list[str]:
    """Build, have it approved by two different people, roll out; return who approved."""
    await ctx.step("build", note, f"build {version}")
    await ctx.step("ask", note, f"ask the team about {version}")
    try:
        signals = await ctx.wait_for(count(2, "approved", distinct="sources"), timeout=patience)
        approvers = [signal.source for signal in signals]
    except SignalTimeout:
        # Too few approvals in time: the manager may decide alone.
        await ctx.step("escalate", note, f"call the manager about {version}")
        decision = await ctx.wait_for_signal("approved by manager", timeout="1d", default=None)
        if decision is None:
            await ctx.step("give up", note, f"drop {version}")
            return []
        approvers = [decision.source]
    await ctx.step("roll out", note, f"roll out {version}")
    return approvers
