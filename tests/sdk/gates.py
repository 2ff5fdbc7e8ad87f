"""A task that waits."""

from flowfabric import App, Context


def gate_of(app: App) -> None:
    @app.task
    async def gate(ctx: Context) -> object:
        signal = await ctx.wait_for_signal("go", timeout="2d")
        return signal.payload
