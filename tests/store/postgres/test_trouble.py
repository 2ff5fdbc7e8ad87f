"""A server that is there and refuses whatever it is asked."""

import asyncpg
import pytest

from flowfabric.core.decisions import Changes
from flowfabric.errors import Transport
from flowfabric.outages import is_outage
from flowfabric.store.base import Transaction
from flowfabric.store.postgres.store import PostgresStore
from tests.store.records import a_lane, save

REFUSE_LANES = """
create function refuse() returns trigger language plpgsql as
$$ begin raise exception 'no more of that' using errcode = '{state}'; end $$;
create trigger refuse before insert on flowfabric.lane for each row execute function refuse();
"""


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("53100", "the disk of the server is full"),
        ("53200", "out of memory"),
        ("53300", "the server has no connection left"),
        ("53400", "no more of that"),
        ("57P01", "the server is being stopped"),
        ("57P02", "no more of that"),
        ("57P03", "starting or stopping"),
        ("25006", "the server only reads"),
        ("58030", "no more of that"),
    ],
)
async def test_a_server_in_trouble_is_an_outage_and_says_which(
    postgres_store: PostgresStore, postgres_database: str, state: str, words: str
) -> None:
    stranger = await asyncpg.connect(postgres_database)
    await stranger.execute(REFUSE_LANES.format(state=state))
    with pytest.raises(Transport, match=words) as caught:
        await save(postgres_store, Changes(inserts=(a_lane("a"),)))
    assert is_outage(caught.value)

    async def body(transaction: Transaction) -> None:
        await transaction.save(Changes(inserts=(a_lane("a"),)))

    await stranger.execute("begin")
    with pytest.raises(Transport, match=words) as theirs:
        await postgres_store.transact_on(stranger, body)
    assert is_outage(theirs.value)
    await stranger.close()
