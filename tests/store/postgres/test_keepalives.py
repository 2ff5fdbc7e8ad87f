"""The server asks after a client it has not heard of, so that its locks do not stay for hours."""

from flowfabric.store.postgres.pool import Connections


async def test_the_server_probes_clients_that_say_nothing(postgres_database: str) -> None:
    connections = Connections(
        postgres_database, pool_max=1, acquire_timeout_s=30, statement_cache_size=1
    )
    connection = await connections.connect()
    try:
        (row,) = await connection.fetch(
            "select current_setting('tcp_keepalives_idle')::int"
            " + current_setting('tcp_keepalives_interval')::int"
            " * current_setting('tcp_keepalives_count')::int"
        )
    finally:
        await connection.close()
    assert row[0] == 25
