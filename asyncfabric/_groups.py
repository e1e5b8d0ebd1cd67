"""Task groups whose failures come out bare: what failed first, not a group around it: callers state what they catch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
from anyio.abc import TaskGroup


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the first failure of a task group instead of the group; use it around `create_task_group()`.

    Where a task failed while others were cancelled from outside, the failure is raised, as trio does without a group.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        failed = group.split(anyio.get_cancelled_exc_class())[1]
        if not isinstance(failed, ExceptionGroup):
            raise  # nothing failed, or the program is interrupted
        error: Exception = failed
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from error.__cause__


@asynccontextmanager
async def beside() -> AsyncIterator[TaskGroup]:
    """Run tasks beside a block and end them with it; what the block raises comes out as it is.

    Cancellation: the tasks end first.
    """
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except Exception as error:
            failure = error  # raised below: the group would wrap it
        finally:
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure
