"""Submitting in bulk: what calls share is looked at once, and each is what it would be alone."""

import pytest
from msgspec import structs

from flowfabric import App, EngineConfig, Retry
from flowfabric.core.bounds import BATCH_MAX
from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import Execution
from flowfabric.core.views import ExecutionContext
from flowfabric.engine.shell import execution_key
from flowfabric.errors import InvalidInput, PayloadTooLarge
from flowfabric.run import Run
from flowfabric.store.base import Reader
from flowfabric.task import Call, SubmitOptions
from flowfabric.testing import SettableClock

PAYLOAD_MAX = 100


@pytest.fixture
def shop(store_url: str) -> App:
    config = EngineConfig(payload_bytes_max=PAYLOAD_MAX)
    app = App(store_url, config=config, clock=SettableClock())

    @app.task
    async def pack(parcel: int) -> None: ...

    @app.task(lane="post", retry=Retry(max_retries=5), timeout="2m", priority=7, keep="1h")
    async def send(address: str, *, parcel: int = 0) -> None: ...

    return app


def calls_of(app: App) -> list[Call[object]]:
    pack, send = app.tasks["pack"], app.tasks["send"]
    return [pack(1), send("a"), pack(2), send("b", parcel=2), send("a"), pack(1)]


async def seen(app: App, run: Run[object]) -> tuple[Execution, ExecutionContext]:
    """All of a run that another one can have in common with it."""

    async def body(reader: Reader) -> Execution:
        key = execution_key(run.execution_id)
        return (await reader.get(Execution, [key]))[key]

    stored = await app.engine.store.read(body)
    context = await app.engine.read_execution_context(run.execution_id)
    anyone = ExecutionId("")
    return structs.replace(stored, execution_id=anyone, partition_key=0), context


@pytest.mark.parametrize(
    "options", [{}, {"priority": 3, "lane": "other", "tags": {"a": "b"}, "delay": "1h"}]
)
async def test_many_calls_are_what_each_would_be_alone(shop: App, options: SubmitOptions) -> None:
    async with shop:
        many = await shop.submit_many(calls_of(shop), **options)
        alone = [await shop.submit(call, **options) for call in calls_of(shop)]
        for together, apart in zip(many, alone, strict=True):
            assert together.task is apart.task
            assert await seen(shop, together) == await seen(shop, apart)


async def test_what_is_submitted_together_is_claimed_in_its_order(shop: App) -> None:
    async with shop:
        pack = shop.tasks["pack"]
        runs = await shop.submit_many([pack(each) for each in range(50)])
        claimed = await shop.engine.claim_many(
            ["default"], limit=50, worker_id="w", worker_instance_id="w-1"
        )
        assert [each.execution_id for each in claimed] == [run.execution_id for run in runs]


async def test_more_than_one_transaction_takes_are_all_stored(shop: App) -> None:
    async with shop:
        pack = shop.tasks["pack"]
        runs = await shop.submit_many([pack(each) for each in range(BATCH_MAX + 1)])
        assert len({run.execution_id for run in runs}) == BATCH_MAX + 1
        assert await runs[-1].state() == "waiting"


async def test_one_bad_call_among_many_is_refused_before_anything_is_stored(shop: App) -> None:
    async with shop:
        pack, send = shop.tasks["pack"], shop.tasks["send"]
        large = [pack(1), send("x" * PAYLOAD_MAX)]
        with pytest.raises(PayloadTooLarge, match=r"^input_payload: \d+ bytes, at most 100 "):
            await shop.submit_many(large)
        for options in ({"priority": 9_001}, {"delay": "soon"}, {"lane": ""}, {"tags": {"=": ""}}):
            with pytest.raises(InvalidInput):
                await shop.submit_many([pack(1)], **options)
        assert await shop.engine.claim(worker_id="w", worker_instance_id="w-1") is None


@pytest.mark.parametrize("options", [{"idempotency_key": "k"}, {"execution_id": "mine"}])
async def test_one_key_or_id_for_several_calls_is_refused_before_anything_is_stored(
    shop: App, options: SubmitOptions
) -> None:
    async with shop:
        pack, send = shop.tasks["pack"], shop.tasks["send"]
        ((field, name),) = options.items()
        refusal = f"^{field}: belongs to one run, and there are 2 calls; .* \\(got {name!r}\\)$"
        for calls in ([pack(1), pack(2)], [pack(1), send("a")], [pack(1), pack(1)]):
            with pytest.raises(InvalidInput, match=refusal):
                await shop.submit_many(calls, **options)
        assert await shop.engine.claim(worker_id="w", worker_instance_id="w-1") is None


@pytest.mark.parametrize("options", [{"idempotency_key": "k"}, {"execution_id": "mine"}])
async def test_one_call_alone_may_have_a_key_or_an_id(shop: App, options: SubmitOptions) -> None:
    async with shop:
        pack = shop.tasks["pack"]
        (first,) = await shop.submit_many([pack(1)], **options)
        (again,) = await shop.submit_many([pack(1)], **options)
        assert await shop.submit_many([], **options) == []
        assert first.execution_id == again.execution_id
