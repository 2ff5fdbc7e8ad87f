"""A process that fires schedules whenever its parent says so. Its clock is a file."""

import asyncio
import sys
from pathlib import Path

from flowfabric import connect
from flowfabric.reconcilers import run_due


class FileClock:
    """The time somebody else writes into a file, as decimal milliseconds."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def now_ms(self) -> int:
        return int(self._path.read_text())

    def set_ms(self, now_ms: int) -> None:
        # Always as many digits, so that nobody ever reads an empty file.
        with self._path.open("r+" if self._path.exists() else "w") as file:
            file.write(f"{now_ms:015}")


async def main(url: str, clock_path: str) -> None:
    async with await connect(url, clock=FileClock(Path(clock_path))) as engine:
        print("ready", flush=True)
        while (await asyncio.to_thread(sys.stdin.readline)).strip() == "go":
            acted = await run_due(engine)
            print(acted.get("schedules", 0), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
