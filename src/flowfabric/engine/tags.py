"""Tags and namespace of an execution."""

from collections.abc import Mapping

from flowfabric.core.checks import INSTANCE_TAG_KEY, check_tag_key, check_tags
from flowfabric.core.creation import new_tags
from flowfabric.core.ids import Namespace, partition_of
from flowfabric.core.records import Execution, ExecutionTag
from flowfabric.core.transitions import Changes, change
from flowfabric.engine.unit import Operations, execution_key
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.store.base import Reader, Transaction


class Tags(Operations):
    async def set_execution_tag(self, execution_id: str, key: str, value: str) -> None:
        """Set one tag, replacing its value."""
        await self.set_execution_tags(execution_id, {check_tag_key(key): value})

    async def set_execution_tags(self, execution_id: str, tags: Mapping[str, str]) -> int:
        """Set several tags, all or none; return how many."""
        checked = check_tags(tags)
        if not checked:
            raise InvalidInput("tags", "must not be empty")
        asked = self.check_execution_id(execution_id)

        async def body(tx: Transaction) -> int:
            key = execution_key(asked)
            execution = (await tx.lock(Execution, [key])).get(key)
            if execution is None:
                raise NotFound("execution", asked)
            now_ms = await tx.now_ms()
            wanted = new_tags(execution, checked)
            added = await tx.insert_new(wanted)
            kept = tuple(tag for tag in wanted if (*key, tag.tag_key) not in added)
            after = change(
                execution,
                now_ms,
                instance_tag=checked.get(INSTANCE_TAG_KEY, execution.instance_tag),
            )
            await tx.save(Changes(updates=(after, *kept)))
            return len(checked)

        return await self.store.transact(body)

    async def get_execution_tag(self, execution_id: str, key: str) -> str | None:
        """The tag's value, or None when the tag or the execution is missing."""
        check_tag_key(key)
        asked = self.check_execution_id(execution_id)
        tag_key = (partition_of(asked), asked, key)

        async def body(reader: Reader) -> str | None:
            tag = (await reader.get(ExecutionTag, [tag_key])).get(tag_key)
            return None if tag is None else tag.tag_value

        return await self.store.read(body)

    async def get_execution_namespace(self, execution_id: str) -> Namespace | None:
        asked = self.check_execution_id(execution_id)

        async def body(reader: Reader) -> Namespace | None:
            execution = (await reader.get(Execution, [execution_key(asked)])).get(
                execution_key(asked)
            )
            return None if execution is None else execution.namespace

        return await self.store.read(body)
