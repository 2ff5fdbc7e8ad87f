"""A thousand calls of a model, under a token budget, a provider's rate limit and caps of tenants.

The budget stops them exactly at its limit, whatever runs at once; after a reset they continue.
"""

import asyncio
import os
from collections import Counter

from flowfabric import App, Context, Limit

CALLS, TENANTS = 1_000, 25
TOKENS_EACH, TOKENS_PER_PERIOD = 100, 40_000

app = App(os.environ.get("FLOWFABRIC_URL", "sqlite:///llm.db"))
provider = Limit("provider", rate="300/s")
per_tenant = Limit("per-tenant", concurrency=3, key="{tenant}")

at_once: Counter[str] = Counter()
most_at_once: Counter[str] = Counter()


async def call_model(tenant: str, prompt: str) -> int:
    """In place of the provider; returns how many tokens it took."""
    at_once[tenant] += 1
    most_at_once[tenant] = max(most_at_once[tenant], at_once[tenant])
    await asyncio.sleep(0.005)
    at_once[tenant] -= 1
    return TOKENS_EACH


@app.task(budget="tokens", limits=[provider, per_tenant])
async def ask(ctx: Context, tenant: str, prompt: str) -> int:
    async with ctx.reserve("tokens", tokens=TOKENS_EACH, wait=True) as call:
        tokens = await ctx.step("call the model", call_model, tenant, prompt)
        call.settle(tokens=tokens)
    return tokens


async def used_up() -> int:
    """Wait until the budget stops the calls; how many tokens they have taken."""
    while True:
        status = await app.budgets.status("tokens")
        if status.closed and not status.reserved:
            return status.usage["tokens"]
        await asyncio.sleep(0.1)


async def main() -> None:
    stop = asyncio.Event()
    async with app:
        await app.budgets.create("tokens", hard={"tokens": TOKENS_PER_PERIOD})
        worker = asyncio.create_task(app.run_worker(concurrency=100, stop=stop))
        calls = [ask(f"tenant-{n % TENANTS}", f"question {n}") for n in range(CALLS)]
        runs = await app.submit_many(calls)
        for period in (1, 2):
            print(
                f"period {period}: stopped at {await used_up():,} of {TOKENS_PER_PERIOD:,} tokens"
            )
            await app.budgets.reset("tokens")
        tokens = [await run.result(timeout="60s") for run in runs]
        status = await app.budgets.status("tokens")
        print(
            f"period 3: {status.usage['tokens']:,} tokens, and all {len(tokens):,} calls are done"
        )
        print(f"at most {max(most_at_once.values())} calls of a tenant at once")
        stop.set()
        await worker


if __name__ == "__main__":
    asyncio.run(main())
