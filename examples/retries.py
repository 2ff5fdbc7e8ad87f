"""Retries with backoff, a failure that is final, and a timeout."""

import asyncio

from flowfabric import App, Context, DoNotRetry, Retry
from flowfabric.errors import ExecutionExpired, ExecutionFailed

app = App("sqlite:///retries.db")


@app.task(retry=Retry(max_retries=4, delay="50ms"))
async def fetch(ctx: Context, url: str) -> str:
    """Fails twice, as servers do."""
    if ctx.retry_count < 2:
        raise ConnectionError(f"{url} does not answer")
    return f"{url} answered at try {ctx.retry_count + 1}"


@app.task(retry=Retry(max_retries=4))
async def charge(amount_cents: int) -> str:
    """Some failures are final, whatever the retries."""
    if amount_cents <= 0:
        raise DoNotRetry("there is nothing to charge")
    return f"charged {amount_cents}"


@app.task(timeout="300ms")
async def think() -> None:
    await asyncio.sleep(3_600)


async def main() -> None:
    stop = asyncio.Event()
    async with app:
        worker = asyncio.create_task(app.run_worker(stop=stop))
        print(await (await app.submit(fetch, "https://example.com")).result(timeout="30s"))
        try:
            await (await app.submit(charge, 0)).result(timeout="30s")
        except ExecutionFailed as error:
            print(f"failed for good: {error.reason}")
        try:
            await (await app.submit(think)).result(timeout="30s")
        except ExecutionExpired as error:
            print(f"ran out of time: {error.reason}")
        stop.set()
        await worker


if __name__ == "__main__":
    asyncio.run(main())
