"""Work that the clock starts: `python cron.py`. It leaves `flowfabric.db` behind.

Any number of processes may run this program: each due time starts one run. With
`catch_up`, runs missed while no process was up are created late: all of them, only the
latest, or none.
"""

import asyncio

from flowfabric import App, Context

app = App("sqlite:///flowfabric.db")
enough = asyncio.Event()
beats: list[int] = []


@app.schedule("0 6 * * *", timezone="Europe/Rome", catch_up="latest")
def morning_report(ctx: Context) -> None:
    """Six in the morning in Rome, in summer and in winter."""


@app.schedule(every="1s", catch_up="none")
async def heartbeat(ctx: Context) -> int:
    beats.append(len(beats) + 1)
    print(f"beat {beats[-1]}")
    if len(beats) == 2:
        enough.set()
    return beats[-1]


@app.task
async def clean_up(folder: str) -> str:
    return f"{folder} is clean"


# A task with arguments; its schedule can be paused, run out of turn and removed by its name.
app.add_schedule("clean-up", clean_up("/tmp"), cron="30 3 * * 0")


async def main() -> None:
    async with app:
        await app.run_worker(stop=enough, signals=False)
        for schedule in (await app.engine.list_schedules()).schedules:
            print(f"{schedule.schedule_id}: {schedule.expression}, {schedule.timezone}")


if __name__ == "__main__":
    asyncio.run(main())
