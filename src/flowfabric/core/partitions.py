"""Where a row lives: small stable hashes of ids.

Everything that belongs to one flow shares the flow's partition; an execution
without a flow takes its partition from its own uuid, so that a busy lane is spread
over all of them and a bare uuid tells where to look. The uuids we make for members
of flows are fitted to the flow's partition for the same reason. The index is written
into the execution id once and read back from there ever after, so ids stay valid when
the deployment's partition count changes.

The hash is CRC-16/XMODEM: part of the id format, so it can never change.
"""

import re
from array import array
from binascii import crc_hqx
from enum import StrEnum
from functools import cache
from typing import Final

import msgspec

from flowfabric.errors import InvalidInput

PARTITIONS_MAX: Final = 32_768
"""A partition index fits a 16-bit signed column."""

INDEX_MAX: Final = 65_535
"""The largest index an id or a partition key can spell."""

_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,4}")


class PartitionConfig(msgspec.Struct, frozen=True):
    """How many partitions a deployment has, by family."""

    num_flow: int = 256
    num_budget: int = 32
    num_quota: int = 32

    def __post_init__(self) -> None:
        for field in ("num_flow", "num_budget", "num_quota"):
            count: object = getattr(self, field)
            if type(count) is not int or not 1 <= count <= PARTITIONS_MAX:
                raise InvalidInput(field, f"must be an integer from 1 to {PARTITIONS_MAX}", count)


def crc16_xmodem(data: bytes) -> int:
    return crc_hqx(data, 0)


def flow_partition(flow_id: str, config: PartitionConfig) -> int:
    return crc16_xmodem(_uuid_bytes(flow_id)) % config.num_flow


def budget_partition(budget_id: str, config: PartitionConfig) -> int:
    return crc16_xmodem(_uuid_bytes(budget_id)) % config.num_budget


def quota_partition(quota_policy_id: str, config: PartitionConfig) -> int:
    return crc16_xmodem(_uuid_bytes(quota_policy_id)) % config.num_quota


def solo_partition(uuid: str, config: PartitionConfig) -> int:
    """The partition of an execution that belongs to no flow."""
    return crc16_xmodem(_uuid_bytes(uuid)) % config.num_flow


def fitted(uuid: str, partition: int, config: PartitionConfig) -> str:
    """The uuid with its last two bytes changed so that it hashes to `partition`.

    Two bytes reach every value of a 16-bit sum, so there is always a solution.
    """
    data = _uuid_bytes(uuid)
    before, wanted = crc16_xmodem(data[:-2]), crc16_xmodem(data)
    wanted += partition - wanted % config.num_flow
    if wanted > INDEX_MAX:
        wanted -= config.num_flow
    return f"{uuid[:-4]}{_unhashed()[wanted] ^ before:04x}"


@cache
def _unhashed() -> "array[int]":
    """By its sum, the two bytes that have it."""
    found = array("H", bytes(2 * (INDEX_MAX + 1)))
    for value in range(INDEX_MAX + 1):
        found[crc16_xmodem(value.to_bytes(2))] = value
    return found


def check_partition(index: int, config: PartitionConfig) -> int:
    """Return `index`, or raise `InvalidInput` if this deployment has no such partition."""
    if not 0 <= index < config.num_flow:
        raise InvalidInput(
            "partition", f"must be below this deployment's {config.num_flow} partitions", index
        )
    return index


def parse_index(text: str) -> int | None:
    """A partition index in its one canonical spelling, or None."""
    if _INDEX.fullmatch(text) is None:
        return None
    index = int(text)
    return index if index <= INDEX_MAX else None


class PartitionFamily(StrEnum):
    """Which hash space an index belongs to. Executions live in their flow's."""

    FLOW = "fp"
    EXECUTION = "fp"
    BUDGET = "b"
    QUOTA = "q"


_FAMILIES: Final = frozenset(family.value for family in PartitionFamily)


class PartitionKey(msgspec.Struct, frozen=True):
    """A partition as clients see it: `{fp:7}`, opaque to them."""

    family: PartitionFamily
    index: int

    @classmethod
    def parse(cls, text: object) -> "PartitionKey":
        if not isinstance(text, str):
            raise InvalidInput("partition_key", "must be a string", text)
        if len(text) < 2 or text[0] != "{" or text[-1] != "}":
            raise InvalidInput("partition_key", "missing braces: must look like {fp:N}", text)
        prefix, colon, digits = text[1:-1].partition(":")
        if not colon:
            raise InvalidInput("partition_key", "malformed body: must look like {fp:N}", text)
        if prefix not in _FAMILIES:
            raise InvalidInput("partition_key", "unknown family prefix", prefix)
        index = parse_index(digits)
        if index is None:
            raise InvalidInput(
                "partition_key", f"invalid index: must be an integer from 0 to {INDEX_MAX}", digits
            )
        return cls(PartitionFamily(prefix), index)

    def format(self) -> str:
        return f"{{{self.family}:{self.index}}}"


def parse_flow_partition(text: str) -> int:
    """The index in `{fp:N}`."""
    key = PartitionKey.parse(text)
    if key.family is not PartitionFamily.FLOW:
        raise InvalidInput("partition", "must be of executions: {fp:N}", text)
    return key.index


def _uuid_bytes(uuid: str) -> bytes:
    return bytes.fromhex(uuid.replace("-", ""))
