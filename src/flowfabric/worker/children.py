"""Executions that a handler has submitted, and how it waits for them."""

from collections.abc import Coroutine
from functools import partial
from typing import Generic, TypeVar

from flowfabric.core.ids import ExecutionId
from flowfabric.core.records import StepKind
from flowfabric.engine.details import Outcome
from flowfabric.run import result_of
from flowfabric.task import Task
from flowfabric.worker.journal import RESULT_OF, Blaming, failure_of, stored_outcome
from flowfabric.worker.lines import DurableCall
from flowfabric.worker.parking import fitting
from flowfabric.worker.services import Services

R_co = TypeVar("R_co", covariant=True)


class Child(Generic[R_co]):
    """An execution submitted by a handler."""

    def __init__(
        self, services: Services, task: Task[..., R_co], execution_id: ExecutionId
    ) -> None:
        self._services = services
        self.task = task
        self.execution_id = execution_id

    def result(self) -> Coroutine[object, object, R_co]:
        """Wait for its end without holding a worker, and return what it returned.

        While it runs, the handler is parked; when it has ended, the handler runs again
        and comes by here with the result. Raises as `Run.result` does. How it ended is
        stored, and the same in every later run.
        """
        services = self._services
        name = f"{RESULT_OF}{self.execution_id}"
        made = self._result(services.steps.ask(StepKind.CHILD, name, ""))
        services.promises.add(f"result() of a child of task {self.task.name}", made)
        return made

    async def _result(self, call: DurableCall) -> R_co:
        services = self._services
        with Blaming(services.lease, call):
            async with call:
                stored = await services.steps.find(call)
                if stored is None:
                    outcome = await self._ended(call)
                else:
                    outcome = stored_outcome(self.execution_id, stored)
                return await fitting(services.parking, partial(result_of, self.task, outcome))

    async def _ended(self, call: DurableCall) -> Outcome:
        """How it ended, stored before the handler sees it."""
        services, ends = self._services, self._services.steps.ends
        while True:
            services.check()
            with services.parking.working():
                outcome = ends.get(call.name) or await services.outcome_of(self.execution_id)
                if outcome is not None:
                    # It may have been replayed since the handler saw how it ended.
                    outcome = ends.setdefault(call.name, outcome)
                    failure = failure_of(outcome)
                    await services.steps.store(call, result=outcome.result, failure=failure)
                    return outcome
            await services.parking.until_ended(self.execution_id)


class BlockingChild(Generic[R_co]):
    """An execution submitted by a plain handler."""

    def __init__(self, child: Child[R_co]) -> None:
        self._child = child
        self.execution_id = child.execution_id

    def result(self) -> R_co:
        return self._child._services.wait(self._child.result())
