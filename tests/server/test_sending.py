"""What requests that come together cost: one look at their token, and one write for an answer."""

import asyncio

import pytest

from flowfabric import Engine
from flowfabric.core.api_tokens import ApiToken
from flowfabric.server.access import Access
from flowfabric.server.serve import GATHERED_MAX, Gathering


class Looked(Engine):
    """Counts how often it is asked about tokens."""

    def __init__(self, engine: Engine) -> None:
        vars(self).update(vars(engine))
        self.looks = 0

    async def check_token(self, presented: str) -> ApiToken | None:
        self.looks += 1
        return await super().check_token(presented)

    async def has_tokens(self) -> bool:
        self.looks += 1
        return await super().has_tokens()


async def test_requests_that_come_together_look_once_whether_there_are_tokens(
    engine: Engine,
) -> None:
    looked = Looked(engine)
    access = Access(looked, anybody="without_tokens")

    await asyncio.gather(*(access.caller(None, "127.0.0.1") for _ in range(100)))

    assert looked.looks == 1


async def test_requests_that_come_together_look_once_at_their_token(engine: Engine) -> None:
    made = await engine.create_token("ci", scopes=["read"])
    looked = Looked(engine)
    access = Access(looked, anybody="never")

    asked = (access.caller(f"Bearer {made.token}", "127.0.0.1") for _ in range(100))
    callers = await asyncio.gather(*asked)

    assert {each.name for each in callers} == {"ci"}
    assert looked.looks == 1


class Sent(asyncio.Transport):
    """Remembers what is sent, write by write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes | None] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.writes.append(None)


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
async def gathering(sent: Sent) -> Gathering:
    return Gathering(sent, asyncio.get_running_loop())


async def test_what_is_written_in_one_turn_is_sent_at_once(
    gathering: Gathering, sent: Sent
) -> None:
    for each in (b"head", b"body", b""):
        gathering.write(each)
    assert sent.writes == []

    await asyncio.sleep(0)
    gathering.write(b"next")
    await asyncio.sleep(0)

    assert sent.writes == [b"headbody", b"next"]


async def test_what_is_large_is_sent_before_the_turn_ends(gathering: Gathering, sent: Sent) -> None:
    large = b"x" * GATHERED_MAX

    gathering.write(b"head")
    gathering.write(large)
    assert sent.writes == [b"head" + large]

    await asyncio.sleep(0)
    assert len(sent.writes) == 1


async def test_what_was_written_is_sent_before_the_connection_is_closed(
    gathering: Gathering, sent: Sent
) -> None:
    gathering.write(b"last")
    gathering.close()

    assert sent.writes == [b"last", None]
