"""Threads of a store that decode a struct for the first time, all at once.

The library that decodes may crash then, so a process of its own tries.
"""

import subprocess
import sys
from pathlib import Path

ALL_AT_ONCE = """
import asyncio, sys, threading
from contextlib import suppress
import msgspec
from flowfabric import App

THREADS = 4

def below(base):
    for kind in base.__subclasses__():
        if kind.__module__.startswith("flowfabric."):
            yield kind
        yield from below(kind)

async def open_and_close():
    async with App(sys.argv[1]):
        pass

def decode(kind, values, together):
    together.wait()
    with suppress(TypeError, msgspec.ValidationError):
        msgspec.convert(values, kind)

asyncio.run(open_and_close())
sys.setswitchinterval(1e-6)
kinds = sorted(set(below(msgspec.Struct)), key=lambda kind: (kind.__module__, kind.__qualname__))
for kind in kinds:
    values = dict.fromkeys(kind.__struct_encode_fields__)
    together = threading.Barrier(THREADS)
    threads = [
        threading.Thread(target=decode, args=(kind, values, together)) for _ in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(kinds) > 100)
"""


def test_they_find_every_struct_prepared(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/flowfabric.db"
    command = [sys.executable, "-X", "faulthandler", "-c", ALL_AT_ONCE, url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr
