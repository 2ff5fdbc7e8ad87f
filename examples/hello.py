"""The smallest program: a task, a submission, a result, all in one process.

Run it twice: the second run finds the database of the first.
"""

import asyncio

from flowfabric import App

app = App("sqlite:///hello.db")


@app.task
async def greet(name: str) -> str:
    return f"Hello, {name}!"


async def main() -> None:
    stop = asyncio.Event()
    async with app:
        worker = asyncio.create_task(app.run_worker(stop=stop))
        run = await app.submit(greet, "world")
        print(await run.result(timeout="30s"))
        stop.set()
        await worker


if __name__ == "__main__":
    asyncio.run(main())
