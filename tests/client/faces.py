"""Both faces of the client behind one: a test asks an async class as it asks the one for threads."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from rayq.client.cluster import Cluster


class Faces:
    """What a cluster makes, of one of both kinds; its methods return when they are done."""

    def __init__(self, cluster: Cluster, *, is_async: bool) -> None:
        self._cluster = cluster
        self.is_async = is_async
        self.runner = asyncio.Runner()

    def close(self) -> None:
        self.runner.close()

    def make(self, kind: str, *arguments: Any, **options: Any) -> Any:
        """As `cluster.producer`, `consumer` and `queue`, by the name of the method."""
        if not self.is_async:
            return getattr(self._cluster, kind)(*arguments, **options)
        make = getattr(self._cluster, f"async_{kind}")
        return Blocking(self.runner, self._run(lambda: make(*arguments, **options)))

    def admin(self) -> Any:
        if not self.is_async:
            return self._cluster.admin
        return Blocking(self.runner, self._run(self._cluster.async_admin))

    def _run(self, function: Callable[[], Any]) -> Any:
        async def call() -> Any:
            return function()

        return self.runner.run(call())


class Blocking:
    """An async object whose coroutines run to their end when they are called."""

    def __init__(self, runner: asyncio.Runner, inner: Any) -> None:
        self._runner = runner
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            ended = Ended()
            self._runner.run(ended.by(lambda: found(*arguments, **options)))
            if ended.error is not None:
                raise ended.error
            if hasattr(ended.result, "__aenter__"):  # a transaction
                return Blocking(self._runner, ended.result)
            return ended.result

        return call

    def __enter__(self) -> Blocking:
        self._runner.run(self.inner.__aenter__())
        return self

    def __exit__(self, *error: Any) -> None:
        self._runner.run(self.inner.__aexit__(*error))


class Ended:
    """How a call has ended. The runner prints its task, and not every error can be printed."""

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None

    async def by(self, call: Callable[[], Any]) -> None:
        try:
            result = call()
            if inspect.isasyncgen(result):
                self.result = [one async for one in result]
            else:
                self.result = await result if inspect.iscoroutine(result) else result
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            self.error = error


def wait(future: Any, faces: Faces) -> Any:
    """The result of a delivery."""
    if not faces.is_async:
        return future.result(30)

    async def result() -> Any:
        return await asyncio.wait_for(_awaited(future), 30)

    return faces.runner.run(result())


async def _awaited(future: Any) -> Any:
    return await future


def as_coroutine_function(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return function(*arguments)

    return call
