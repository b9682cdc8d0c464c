"""Which server samples what: the requests of one process, spread over the servers that it asks."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

S = TypeVar("S")


_MAX_BUSY_S = 60.0
_MAX_PAUSE_S = 8.0  # where the server does not say how long


class ServerError(RuntimeError):
    """A server does not answer, or answers with an error."""


class Patience:
    """Waits for a server that is busy: status 429 or 503. A server that is busy for too long counts as lost.

    Attributes:
        waited_s: seconds of all pauses so far.
    """

    def __init__(self) -> None:
        self.waited_s = 0.0
        self._pause_s = 0.5

    def pause_s(self, status: int, retry_after: str | None) -> float | None:
        """Seconds until the server is to be asked again. None: the status is no reason to wait.

        Args:
            status: of the answer.
            retry_after: the answer's header Retry-After: seconds (RFC 9110, 10.2.3). A date is not read.

        Raises:
            ServerError: the server has been busy for too long, or wants a longer pause.
        """
        if status not in (429, 503):
            return None
        is_told = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
        pause_s = float(retry_after[:9]) if is_told and retry_after else self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        pause_s = max(pause_s, 0.1)
        if self.waited_s + pause_s > _MAX_BUSY_S:
            raise ServerError(f"it is busy (status {status}) after {self.waited_s:g} s, and wants {pause_s:g} s more")
        self.waited_s += pause_s
        return pause_s


class ServerPool(Generic[S]):
    """The servers that one process asks for its samples. There is no router between processes.

    A sample goes to the server that has its prompt, else to the server with the fewest samples of this process.

    Args:
        servers: hashable. Equal loads are resolved in this order; each process begins elsewhere, see `from_place_of`.
        limit: most samples of this process at a server at once.
        on_loss: is told of each server that is lost.

    Attributes:
        servers: all servers that are not lost.
    """

    def __init__(self, servers: Sequence[S], limit: int, on_loss: Callable[[S, Exception], None]) -> None:
        self.servers = list(servers)
        self._limit = limit
        self._on_loss = on_loss
        self._load = dict.fromkeys(servers, 0)
        self._asking: dict[S, set[asyncio.Task[None]]] = {server: set() for server in servers}
        self._changed = asyncio.Condition()
        self._last_error: Exception | None = None

    async def use(self, servers: Sequence[S]) -> None:
        """Takes these servers in place of those before. Samples of the others go on at these."""
        async with self._changed:
            for server in servers:
                self._load.setdefault(server, 0)
                self._asking.setdefault(server, set())
            left, self.servers = [server for server in self.servers if server not in servers], list(servers)
            for server in left:
                self._send_away(server)
            self._changed.notify_all()

    async def complete(self, row: int, ask: Callable[[S], Coroutine[Any, Any, None]], homes: dict[int, S]) -> None:
        """Asks one server after the other, until one has answered to the end.

        Args:
            row: of the sample's prompt.
            ask: asks a server. It may be cancelled while it waits, and is called again with another server.
            homes: for each row the server that has its prompt, which is noted here.

        Raises:
            ServerError: all servers are lost.
        """
        while True:
            async with self._place(row, homes) as server:
                asking = asyncio.create_task(ask(server))
                self._asking[server].add(asking)
                try:
                    return await asking
                except (OSError, ServerError) as error:
                    await self.lose(server, error)
                except asyncio.CancelledError:
                    asking.cancel()
                    if _is_cancelled():
                        raise
                finally:
                    self._asking[server].discard(asking)

    def is_asked(self, server: S) -> bool:
        """Whether samples wait for the server."""
        return bool(self._asking[server])

    async def lose(self, server: S, error: Exception) -> None:
        """Takes a server out, and sends its samples to the others."""
        async with self._changed:
            if server not in self.servers:
                return
            self.servers.remove(server)
            self._last_error = error
            self._on_loss(server, error)
            self._send_away(server)
            self._changed.notify_all()

    def _send_away(self, server: S) -> None:
        for task in self._asking[server]:
            task.cancel()

    @asynccontextmanager
    async def _place(self, row: int, homes: dict[int, S]) -> AsyncIterator[S]:
        """A server for a sample of the prompt, as soon as one has room."""
        async with self._changed:
            while (server := self._choose(row, homes)) is None:
                await self._changed.wait()
            self._load[server] += 1
        try:
            yield server
        finally:
            async with self._changed:
                self._load[server] -= 1
                self._changed.notify()

    def _choose(self, row: int, homes: dict[int, S]) -> S | None:
        if not self.servers:
            raise ServerError(f"no server is left: {self._last_error}")
        home = homes.get(row)
        if home not in self.servers or self._load[home] >= self._limit:
            home = min(self.servers, key=self._load.__getitem__)
            if self._load[home] >= self._limit:
                return None
            homes[row] = home
        return home


def from_place_of(rank: int, size: int, servers: Sequence[S]) -> list[S]:
    """The servers from the one with which this rank begins, so that ranks with few samples do not choose the same."""
    first = rank * len(servers) // size
    return [*servers[first:], *servers[:first]]


def _is_cancelled() -> bool:
    """Whether all work is cancelled, not just the question to a lost server."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
