"""Operations of the specification that this engine does not have yet.

Each exists under its name and says so, whatever it is given.
"""

from collections.abc import Callable, Coroutine
from typing import Final, NoReturn

from flowfabric.errors import Unavailable

NAMES: Final = (
    "block_execution_for_admission",
    "check_admission",
    "claim_for_worker",
    "create_budget",
    "create_quota_policy",
    "get_budget_status",
    "heartbeat_worker",
    "issue_grant_and_claim",
    "issue_reclaim_grant",
    "list_workers",
    "mark_worker_dead",
    "read_budget_usage_and_limits",
    "read_quota_policy_limits",
    "reclaim_execution",
    "record_spend",
    "register_worker",
    "release_admission",
    "release_budget",
    "report_usage",
    "report_usage_admin",
    "reset_budget",
    "subscribe_instance_tags",
    "unblock_execution",
)


def _unavailable(name: str) -> Callable[..., Coroutine[object, object, NoReturn]]:
    async def operation(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise Unavailable(name)

    operation.__name__ = name
    operation.__doc__ = f"Not there yet: raises `Unavailable({name!r})`."
    return operation


class Unimplemented:
    """What answers `Unavailable`."""


for _name in NAMES:
    setattr(Unimplemented, _name, _unavailable(_name))
