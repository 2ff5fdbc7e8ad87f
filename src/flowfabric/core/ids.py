"""Identifiers: their types, their one canonical spelling, how they are made.

An execution id is `{fp:N}:<uuid>`. N is the partition and travels with the id, so
finding a row needs no lookup; it follows from the uuid too, so that the bare uuid
serves as well. Parsers accept exactly one spelling of either. People may choose ids of
their own, which stand for a uuid derived from them and their namespace.

Ids are made from entropy and time handed in by the caller; nothing here draws
either. New uuids are time-ordered (version 7), so inserts stay local in an index.
"""

import hashlib
import re
from array import array
from binascii import crc_hqx
from collections.abc import Collection
from enum import StrEnum
from functools import cache, lru_cache
from typing import Final, NewType

import msgspec

from flowfabric.core.bounds import NAME_BYTES_MAX
from flowfabric.errors import InvalidInput

# Where a row lives: small stable hashes of ids ------------------------------
#
# Everything that belongs to one flow shares the flow's partition; an execution
# without a flow takes its partition from its own uuid, so that a busy lane is spread
# over all of them and a bare uuid tells where to look. The uuids we make for members
# of flows are fitted to the flow's partition for the same reason. The index is written
# into the execution id once and read back from there ever after, so ids stay valid when
# the deployment's partition count changes.
#
# The hash is CRC-16/XMODEM: part of the id format, so it can never change.

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


def partition_for(uuid: str, config: PartitionConfig) -> int:
    """The partition of a flow with its members, or of an execution that belongs to none."""
    return crc16_xmodem(bytes.fromhex(uuid.replace("-", ""))) % config.num_flow


def fitted(uuid: str, partition: int, config: PartitionConfig) -> str:
    """The uuid with its last two bytes changed so that it hashes to `partition`.

    Two bytes reach every value of a 16-bit sum, so there is always a solution.
    """
    data = bytes.fromhex(uuid.replace("-", ""))
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


ExecutionId = NewType("ExecutionId", str)
FlowId = NewType("FlowId", str)
LaneId = NewType("LaneId", str)
WorkerId = NewType("WorkerId", str)
WorkerInstanceId = NewType("WorkerInstanceId", str)
Namespace = NewType("Namespace", str)
LeaseId = NewType("LeaseId", str)
AttemptId = NewType("AttemptId", str)
SuspensionId = NewType("SuspensionId", str)
WaitpointId = NewType("WaitpointId", str)
WaitpointKey = NewType("WaitpointKey", str)
SignalId = NewType("SignalId", str)
EdgeId = NewType("EdgeId", str)
BudgetId = NewType("BudgetId", str)
QuotaPolicyId = NewType("QuotaPolicyId", str)
GateId = NewType("GateId", str)
GateOwnerId = NewType("GateOwnerId", str)
"""A quota policy or a budget."""

LANE_ID_MAX_BYTES: Final = 64
UUID_CHARS: Final = 36
UUID_BYTES: Final = 16
FIRST_UUID: Final = "00000000-0000-0000-0000-000000000000"
LAST_UUID: Final = "ffffffff-ffff-ffff-ffff-ffffffffffff"

_UUID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_COUNTED: Final = 12
"""Bits of a new uuid that tell apart those of one millisecond."""
_VERSION_4: Final = bytes(byte & 0x0F | 0x40 for byte in range(256))
_VARIANT_1: Final = bytes(byte & 0x3F | 0x80 for byte in range(256))
_TAG_OPEN: Final = "{fp:"
_TAG_CLOSE: Final = "}:"


def parse_execution_id(text: object, field: str = "execution_id") -> ExecutionId:
    """Accept the canonical spelling only. Whether N exists here is `check_partition`'s business."""
    if not isinstance(text, str):
        raise InvalidInput(field, "must be a string", text)
    tag, close, uuid = text.partition(_TAG_CLOSE)
    if not close or not tag.startswith(_TAG_OPEN):
        raise InvalidInput(field, "missing tag: must look like {fp:N}:<uuid>", text)
    if parse_index(tag[len(_TAG_OPEN) :]) is None:
        raise InvalidInput(
            field,
            f"invalid partition index: N in {{fp:N}} must be an integer from 0 to {INDEX_MAX},"
            " without sign or leading zeros",
            text,
        )
    if _UUID.fullmatch(uuid) is None:
        raise InvalidInput(
            field, "invalid uuid: must be lower-case and hyphenated after {fp:N}:", text
        )
    return ExecutionId(text)


def partition_of(execution_id: ExecutionId) -> int:
    """The partition written in the id."""
    return int(execution_id[len(_TAG_OPEN) : -UUID_CHARS - len(_TAG_CLOSE)])


def uuid_of(execution_id: ExecutionId) -> str:
    return execution_id[-UUID_CHARS:]


def split_ids(execution_ids: Collection[ExecutionId]) -> tuple[list[int], list[str]]:
    """Partitions and uuids of many ids."""
    first, last = len(_TAG_OPEN), -UUID_CHARS - len(_TAG_CLOSE)
    return [int(each[first:last]) for each in execution_ids], [
        each[-UUID_CHARS:] for each in execution_ids
    ]


def start_after(cursor: str | None) -> str | None:
    """Where a list ordered by uuid continues after `cursor`; without one, where it begins.

    None when nothing can follow.
    """
    return FIRST_UUID if cursor is None else next_uuid(cursor)


def uuid_after(execution_id: ExecutionId) -> str | None:
    """The uuid that follows in order; none follows the last."""
    return next_uuid(uuid_of(execution_id))


def next_uuid(uuid: str) -> str | None:
    return None if uuid == LAST_UUID else _hyphenate(f"{int(uuid.replace('-', ''), 16) + 1:032x}")


def make_execution_id(partition: int, uuid: str) -> ExecutionId:
    assert 0 <= partition <= INDEX_MAX, "a partition index is a 16-bit number"
    return ExecutionId(f"{{fp:{partition}}}:{uuid}")


def parse_any_id(
    text: object, partitions: PartitionConfig, field: str = "execution_id"
) -> ExecutionId:
    """An execution id in full, or its bare uuid."""
    if isinstance(text, str) and _UUID.fullmatch(text.lower()) is not None:
        return solo_execution_id(parse_uuid(field, text), partitions)
    return parse_execution_id(text, field)


def parse_own_id(text: object, field: str = "execution_id") -> str | None:
    """The id a caller chose for an execution or a flow; None if the text is one of ours, or bad."""
    if not isinstance(text, str) or text.startswith("{") or _UUID.fullmatch(text.lower()):
        return None
    if text.isspace():
        raise InvalidInput(field, "must not be only spaces", text)
    return _parse_name(field, text)


def own_execution_id(namespace: str, own_id: str, partitions: PartitionConfig) -> ExecutionId:
    """The execution id that a caller's own id stands for, in a namespace."""
    return solo_execution_id(named_uuid("execution", namespace, own_id), partitions)


def named_flow_id(text: object, namespace: str) -> FlowId:
    """A flow's uuid, or the one that a caller's own id stands for, in a namespace."""
    own_id = parse_own_id(text, "flow_id")
    if own_id is None:
        return FlowId(parse_uuid("flow_id", text))
    return FlowId(named_uuid("flow", namespace, own_id))


def named_budget_id(text: object, namespace: str) -> BudgetId:
    """A budget's uuid, or the one that its name stands for, in a namespace."""
    name = parse_own_id(text, "budget_id")
    if name is None:
        return BudgetId(parse_uuid("budget_id", text))
    return BudgetId(named_uuid("budget", namespace, name))


# Uuids that follow from names can be told from others, and begin with the mark of who may
# give the name: a namespace, or a flow for its nodes. So nobody else can take them first.

_MARKS: Final = {"flow": "8", "namespace": "9"}
"""The digit that tells owners of one kind from those of another: flows are anybody's to make."""


def named_uuid(kind: str, namespace: str, name: str) -> str:
    """The uuid that a name stands for in a namespace; neither contains a NUL."""
    digest = hashlib.sha256("\x00".join((kind, namespace, name)).encode())
    return marked_uuid(mark_of("namespace", namespace), digest.hexdigest())


@lru_cache(maxsize=1_024)
def mark_of(kind: str, owner: str) -> str:
    """What is in the uuids that follow from names of this owner: thirteen digits."""
    return hashlib.sha256(f"{kind}\x00{owner}".encode()).hexdigest()[:12] + _MARKS[kind]


def marked_uuid(mark: str, digits: str) -> str:
    """A uuid of version 8 with a mark, and eighteen digits that are its own."""
    return f"{mark[:8]}-{mark[8:12]}-8{digits[:3]}-{mark[12]}{digits[3:6]}-{digits[6:18]}"


def mark_in(uuid: str) -> str | None:
    """The mark of a uuid that follows from a name."""
    return f"{uuid[:8]}{uuid[9:13]}{uuid[19]}" if uuid[14] == "8" else None


def derived_uuid(*parts: str) -> str:
    """The same for the same parts, none of which contains a NUL."""
    digest = bytearray(hashlib.sha1("\x00".join(parts).encode()).digest()[:UUID_BYTES])
    digest[6] = digest[6] & 0x0F | 0x50
    digest[8] = digest[8] & 0x3F | 0x80
    return uuid_text(bytes(digest))


def solo_execution_id(uuid: str, partitions: PartitionConfig) -> ExecutionId:
    """The id of an execution that belongs to no flow. Any uuid is embedded verbatim."""
    return make_execution_id(partition_for(uuid, partitions), uuid)


def check_own_partition(execution_id: ExecutionId, partitions: PartitionConfig) -> ExecutionId:
    """An id in full is mistaken if its uuid tells another partition."""
    right = solo_execution_id(uuid_of(execution_id), partitions)
    if execution_id != right:
        raise InvalidInput(
            "execution_id",
            f"does not have the partition of its uuid; give the uuid alone, or {right}",
            execution_id,
        )
    return execution_id


def member_execution_id(flow_id: FlowId, uuid: str, partitions: PartitionConfig) -> ExecutionId:
    """The id of a member of a flow, with a uuid that tells its partition by itself."""
    partition = partition_for(flow_id, partitions)
    return make_execution_id(partition, fitted(uuid, partition, partitions))


def named_member_id(flow_id: FlowId, text: str, partitions: PartitionConfig) -> str:
    """The member that a uuid, or a name within the flow, stands for. Full ids stay as they are."""
    own_id = parse_own_id(text)
    if own_id is None:
        return text if text.startswith("{") else flow_execution_id(flow_id, text, partitions)
    digest = hashlib.sha256("\x00".join((flow_id, "member", own_id)).encode())
    uuid = marked_uuid(mark_of("flow", flow_id), digest.hexdigest())
    return member_execution_id(flow_id, uuid, partitions)


def flow_execution_id(flow_id: FlowId, uuid: str, partitions: PartitionConfig) -> ExecutionId:
    """The id of a member of a flow. Any uuid is embedded verbatim."""
    return make_execution_id(partition_for(flow_id, partitions), uuid)


def parse_uuid(field: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidInput(field, "must be a string", text)
    if _UUID.fullmatch(text) is None:
        raise InvalidInput(field, "must be a lower-case hyphenated uuid", text)
    return text


def parse_lane_id(text: object, field: str = "lane_id") -> LaneId:
    """Non-empty printable ASCII of at most 64 bytes."""
    if not isinstance(text, str):
        raise InvalidInput(field, "must be a string", text)
    # A lone surrogate becomes bytes above 0x7E here, and so is refused below.
    data = text.encode("utf-8", "surrogatepass")
    if not data:
        raise InvalidInput(field, "must not be empty", text)
    if len(data) > LANE_ID_MAX_BYTES:
        problem = f"too long: {len(data)} bytes, at most {LANE_ID_MAX_BYTES} allowed"
        raise InvalidInput(field, problem, text)
    for index, byte in enumerate(data):
        if not 0x20 <= byte <= 0x7E:
            raise InvalidInput(field, f"non-printable byte at index {index}", text)
    return LaneId(text)


def parse_worker_id(field: str, text: object) -> str:
    """A worker's or worker instance's name: printable, without whitespace."""
    name = _parse_name(field, text)
    if any(char.isspace() for char in name):
        raise InvalidInput(field, "must not contain whitespace", text)
    return name


def parse_namespace(text: object) -> Namespace:
    return Namespace(_parse_name("namespace", text))


def parse_execution_kind(text: object) -> str:
    return _parse_name("execution_kind", text)


def uuid7(now_ns: int, entropy: bytes) -> str:
    """A time-ordered uuid from the time and eight random bytes.

    The bits after the milliseconds hold the fraction that is left, in steps of about 244 ns:
    what one process makes within a millisecond keeps its order.
    """
    now_ms, rest_ns = divmod(now_ns, 1_000_000)
    assert 0 <= now_ms < 1 << 48, "the time fits in 48 bits"
    assert len(entropy) == 8, "a version 7 uuid takes eight bytes of entropy here"
    high = (rest_ns << 12) // 1_000_000 | 0x7000
    low = int.from_bytes(entropy) & 0x3FFFFFFFFFFFFFFF | 0x8000000000000000
    return _hyphenate(f"{now_ms:012x}{high:04x}{low:016x}")


class Stamps:
    """Times to make ids of, never the same one twice: what is submitted first sorts first."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, now_ns: int, count: int) -> int:
        """The first of `count` in a row."""
        first = max((now_ns << _COUNTED) // 1_000_000, self._next)
        self._next = first + count
        return first


def new_execution_ids(
    first_stamp: int, entropy: bytes, partitions: PartitionConfig
) -> list[ExecutionId]:
    """Ids of executions that belong to no flow, from stamps in a row and eight random bytes each.

    They are ordered: what is submitted together is claimed in the order it was given.
    """
    tails = bytearray(entropy)
    tails[0::8] = tails[0::8].translate(_VARIANT_1)
    made: list[ExecutionId] = []
    for place in range(len(entropy) // 8):
        stamp = first_stamp + place
        head = stamp >> _COUNTED << 16 | 0x7000 | stamp & 0x0FFF
        uuid = head.to_bytes(8) + tails[place * 8 : place * 8 + 8]
        partition = crc16_xmodem(uuid) % partitions.num_flow
        made.append(ExecutionId(f"{{fp:{partition}}}:{_hyphenate(uuid.hex())}"))
    return made


MARK_BYTES: Final = 6
"""How many bytes of an id a mark may take."""


def uuids_from(entropy: bytes, mark: bytes = b"") -> bytes:
    """Random bytes as random uuids, sixteen bytes each, which begin with `mark`."""
    made = bytearray(entropy)
    assert len(mark) <= MARK_BYTES, "the version of a uuid is behind its mark"
    for place, byte in enumerate(mark):
        made[place::UUID_BYTES] = bytes([byte]) * (len(made) // UUID_BYTES)
    made[6::UUID_BYTES] = made[6::UUID_BYTES].translate(_VERSION_4)
    made[8::UUID_BYTES] = made[8::UUID_BYTES].translate(_VARIANT_1)
    return bytes(made)


def uuid4_from(entropy: bytes) -> str:
    """A random uuid from sixteen random bytes."""
    assert len(entropy) == UUID_BYTES, "a version 4 uuid takes sixteen bytes of entropy"
    return uuid_text(uuids_from(entropy))


def uuid_text(sixteen: bytes) -> str:
    return _hyphenate(sixteen.hex())


def check_mark(field: str, mark: object) -> str:
    """A mark of ids: twelve hexadecimal digits."""
    if not isinstance(mark, str) or re.fullmatch(r"[0-9a-f]{12}", mark) is None:
        raise InvalidInput(field, f"must be {2 * MARK_BYTES} hexadecimal digits", mark)
    return mark


def redact_token(token: str) -> str:
    """A waitpoint token as it may be logged: its key id and the length of the rest."""
    kid, _, secret = token.partition(":")
    if not kid or not secret:
        return "<REDACTED:malformed>"
    return f"{kid}:<REDACTED:len={len(secret)}>"


def _parse_name(field: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidInput(field, "must be a string", text)
    if not text:
        raise InvalidInput(field, "must not be empty", text)
    # Checked before the length: unprintable includes lone surrogates, which do not encode.
    if not text.isprintable():
        raise InvalidInput(field, "must not contain control or unprintable characters", text)
    length = len(text.encode())
    if length > NAME_BYTES_MAX:
        problem = f"too long: {length} bytes, at most {NAME_BYTES_MAX} allowed"
        raise InvalidInput(field, problem, text)
    return text


def _hyphenate(digits: str) -> str:
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
