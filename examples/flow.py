"""A flow: pages are fetched side by side, and a report is made of the first three.

    python flow.py

The report needs three pages. Once it has them, the fetch that takes too long is
cancelled. Nothing waits in memory: the flow is in the database, and any worker on it
could run any part.
"""

import asyncio

from flowfabric import App, Context, Quorum

app = App("sqlite:///flow.db")

SITES = {"news": 0.1, "weather": 0.2, "sport": 0.3, "stocks": 60.0}


@app.task
async def fetch(ctx: Context, site: str) -> str:
    await asyncio.sleep(SITES[site])
    return f"the {site} page"


@app.task
async def summarise(ctx: Context, title: str, pages: list[str]) -> str:
    return f"{title}: {', '.join(pages)}"


@app.task
def send(ctx: Context, report: str) -> int:
    print(f"sending “{report}”")
    return len(report)


async def main() -> None:
    async with app:
        flow = app.flow("morning")
        pages = [flow.add(fetch, site, name=site) for site in SITES]
        report = flow.add(summarise, "today", join=pages, when=Quorum(3, cancel_remaining=True))
        sent = flow.add(send, report)
        run = await flow.start()
        await run.graph()

        stop = asyncio.Event()
        worker = asyncio.create_task(app.run_worker(stop=stop))
        print(f"{await run.result(sent, timeout='60s')} characters sent")
        await run.wait(timeout="60s")
        await run.graph()
        stop.set()
        await worker


if __name__ == "__main__":
    asyncio.run(main())
