"""The scenes of the demonstration, in the order they are played.

A scene is a coroutine function that gets the stage. To add one, write it and put
it into `SCENES`.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

from flowfabric.demo.program import (
    LEASE_TTL,
    STEPS,
    announce,
    app,
    count_letters,
    fetch_weather,
    launch,
    make_issue,
    publish,
    resize_photo,
)
from flowfabric.demo.stage import PATIENCE_S, Stage, ended, started, suspended

PHOTOS: Final = 12
SECTIONS: Final = ("politics", "science", "sport")
KILLED_IN: Final = STEPS[2]

Scene = Callable[[Stage], Awaitable[None]]


async def survive_a_crash(stage: Stage) -> None:
    """A worker is killed in the middle of a step; another one finishes the work."""
    stage.title("1  A pipeline survives kill -9")
    stage.say(
        f"[bold]publish[/] is an ordinary async function with five steps: {', '.join(STEPS)}."
        " Submitting it stores it in the database; from then on it cannot get lost."
    )
    article = (await app.submit(publish, 42)).execution_id
    stage.happened("+", f"publish(42) stored as {article[-12:]}")
    first = stage.start_worker()
    stage.happened("●", f"worker started: process {first}", "cyan")
    await stage.follow(started(KILLED_IN), {"publish": article})
    stage.kill_worker(first)
    stage.happened("✗", f"kill -9 {first}, in the middle of “{KILLED_IN}”", "bold red")
    sentence = (await stage.engine.explain_execution(article)).sentence
    stage.say(f"The database still says: [italic]{sentence}[/]")
    stage.say(
        f"But the dead worker no longer renews its lease. After {LEASE_TTL} the lease ends, and"
        " any worker may take over. Were the first one only slow, its writes would be refused"
        " from then on: it holds an old epoch."
    )
    second = stage.start_worker()
    stage.happened("●", f"another worker started: process {second}", "cyan")
    await stage.follow(ended, {"publish": article})
    stage.happened("✓", "publish(42) is completed", "bold green")
    _prove(stage)


def _prove(stage: Stage) -> None:
    """Show how often each step ran, by the journal the steps wrote themselves."""
    begun = Counter(each.step for each in stage.notes() if not each.done)
    done = Counter(each.step for each in stage.notes() if each.done)
    for step in STEPS:
        again = " (cut off once, so it ran again)" if begun[step] > done[step] else ""
        stage.say(f"      {step:<12} finished [bold]{done[step]}[/] time{again}")
    assert set(done.values()) == {1}, "a finished step runs once"
    stage.say(
        "The function ran again from the top, but finished steps returned what they had"
        " stored: nothing that had finished ran twice."
    )


async def retry(stage: Stage) -> None:
    """A task fails twice and is tried again; many small ones run beside it."""
    stage.title("2  Failures are retried, the rest goes on")
    stage.say(
        f"[bold]fetch_weather[/] talks to an API that is down. Beside it: {PHOTOS} photos,"
        " submitted in one transaction."
    )
    weather = (await app.submit(fetch_weather, "Rome")).execution_id
    photos = await app.submit_many([resize_photo(number) for number in range(PHOTOS)])
    watched: dict[str, str] = {"fetch_weather": weather}
    watched |= {f"photo {number}": run.execution_id for number, run in enumerate(photos)}
    await stage.follow(ended, watched)
    for attempt in await stage.engine.list_attempts(weather):
        failed = attempt.failure_reason is not None
        outcome, _, _ = (attempt.failure_reason or "completed").partition(" (in ")
        stage.happened(
            "✗" if failed else "✓",
            f"try {attempt.attempt_index + 1}: {outcome}",
            "red" if failed else "green",
        )
    stage.happened("✓", f"{PHOTOS} photos resized", "green")
    stage.say("Every try is kept, with its reason; how often and when is the task's policy.")


async def flow(stage: Stage) -> None:
    """Tasks that need each other's results."""
    stage.title("3  Tasks that wait for each other")
    stage.say(
        "A flow: every section is counted, [bold]make_issue[/] gets the list of counts,"
        " [bold]announce[/] gets the issue. Who waits for whom is stored with them, at once."
    )
    magazine = app.flow("magazine")
    sections = [magazine.add(count_letters, name, name=name) for name in SECTIONS]
    issue = magazine.add(make_issue, "May", join=sections)
    announced = magazine.add(announce, issue)
    run = await magazine.start()
    await run.graph(console=stage.console)
    await stage.follow(ended, {"announce": run.run(announced).execution_id})
    await run.graph(console=stage.console)
    stage.happened("✓", await run.result(announced), "bold green")


async def ask_people(stage: Stage) -> None:
    """A task waits for two people while no worker exists at all."""
    stage.title("4  Two people approve, and nobody waits meanwhile")
    stage.say(
        "[bold]launch[/] waits for two signals from different people: one line,"
        ' [cyan]await ctx.wait_for(count(2, "approved", distinct="sources"))[/].'
    )
    run = await app.submit(launch, "the summer issue")
    await stage.follow(suspended, {"launch": run.execution_id})
    stage.stop_workers()
    stage.happened("○", "it is suspended; every worker is stopped: nothing runs", "cyan")
    for person, outcome in (
        ("Ada", "one is not enough"),
        ("Ada", "she counts once; it is kept for a later wait"),
    ):
        await run.signal("approved", source=person)
        stage.happened("✉", f"{person} approves: {outcome}", "yellow")
    await run.signal("approved", source="Bob")
    stage.happened("✉", "Bob approves: the condition is met", "yellow")
    stage.happened("●", f"worker started: process {stage.start_worker()}", "cyan")
    await stage.follow(ended, {"launch": run.execution_id})
    approvers = await run.result(timeout=PATIENCE_S)
    stage.happened("✓", f"launched, approved by {' and '.join(approvers)}", "bold green")
    stage.say("It could have waited for months: a waiting task is a row in the database.")


SCENES: Final[tuple[Scene, ...]] = (survive_a_crash, retry, flow, ask_people)
