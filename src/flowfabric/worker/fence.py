"""The lease, checked inside the handler's own database transaction."""

from flowfabric.worker.services import Services


class Fence:
    """Holds the execution's row for as long as the transaction of `connection` lasts."""

    def __init__(self, services: Services, connection: object) -> None:
        self._services = services
        self._connection = connection

    def __enter__(self) -> None:
        self._services.check_fence_sync(self._connection)
        self._services.lease.fenced += 1

    def __exit__(self, *exc_info: object) -> None:
        self._services.lease.fenced -= 1

    async def __aenter__(self) -> None:
        await self._services.check_fence(self._connection)
        self._services.lease.fenced += 1

    async def __aexit__(self, *exc_info: object) -> None:
        self._services.lease.fenced -= 1
