"""The demonstration, on a terminal, as newcomers see it."""

import sys
import time
from pathlib import Path

from flowfabric import connect
from flowfabric.core.states import PublicState
from tests.cli.command import run, run_on_terminal

DEMO = (sys.executable, "-m", "flowfabric.demo")


async def test_the_demonstration_survives_its_own_crash(tmp_path: Path) -> None:
    started = time.monotonic()
    ran = run_on_terminal(DEMO, columns=100, cwd=tmp_path)
    took_s = time.monotonic() - started

    assert ran.status == 0, ran.out
    text = " ".join(ran.out.split())
    for expected in (
        "kill -9",
        "in the middle of “illustrate”",
        "publish(42) is completed",
        "illustrate finished 1 time (cut off once, so it ran again)",
        "try 3: completed",
        "12 photos resized",
        "magazine completed 5 of 5 ended",
        "out now, May: 3 sections, 20 letters",
        "launched, approved by Ada and Bob",
    ):
        assert expected in text, ran.out
    assert "\x1b[32m" + 24 * "━" in ran.err, "a finished bar is full and green"
    assert took_s < 60

    url = f"sqlite:///{tmp_path}/flowfabric-demo.db"
    listed = run("ls", "--json", url=url).documents
    assert {each["public_state"] for each in listed} == {"completed"}
    assert len(listed) == 1 + 1 + 12 + 5 + 1
    (published,) = (each for each in listed if each["execution_kind"] == "publish")
    assert (published["lease_reclaim_count"], published["total_attempt_count"]) == (1, 2)
    (weather,) = (each for each in listed if each["execution_kind"] == "fetch_weather")
    assert weather["retry_count"] == 2
    async with await connect(url) as engine:
        state = await engine.read_execution_state(str(published["execution_id"]))
        assert state is PublicState.COMPLETED
