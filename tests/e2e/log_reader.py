"""A subscriber that may die at any moment: a line for every event, with the cursor after it.

python -m tests.e2e.log_reader URL FILE [UNTIL]
"""

import asyncio
import os
import sys
from pathlib import Path

import flowfabric


def resumed(path: Path) -> str:
    """The cursor of the last whole line; what stands after it is cut off."""
    written = path.read_bytes() if path.exists() else b""
    whole = written[: written.rfind(b"\n") + 1]
    with path.open("ab") as file:
        file.truncate(len(whole))
    lines = whole.splitlines()
    return lines[-1].split()[1].decode() if lines else "0"


async def read(url: str, path: Path, until: int | None) -> None:
    cursor = resumed(path)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    async with await flowfabric.connect(url) as engine:
        if until is not None and cursor.startswith(f"{until}-"):
            return
        async for told in await engine.subscribe_events(after=cursor):
            os.write(file, f"{told.event.event_id} {told.cursor}\n".encode())
            if told.event.event_id == until:
                return


if __name__ == "__main__":
    _, url, path, *until = sys.argv
    asyncio.run(read(url, Path(path), int(until[0]) if until else None))
