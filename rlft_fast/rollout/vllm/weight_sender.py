"""Sends a stream of weights through sockets, once for any number of receivers, on this machine or on others.

    sender:   listens -> update_weights(address, secret) -> sends each piece to all -> finish_weight_update(version)
    receiver: connects, shows the secret -> reads the pieces

A piece is the size of its header, the header in JSON, and its bytes. Nothing is unpickled, and a connection that does
not show the secret in a few seconds is closed. A stream that breaks off, or is none, ends in a `TransferError` on both
sides.
"""

import math
import secrets
import selectors
import socket
import struct
import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Annotated, Any, Protocol, Self

import torch
from pydantic import Field, NonNegativeInt

from rlft_fast.engine import Piece
from rlft_fast.rollout.vllm.answers import Answer, AnswerError, read_answer

_CONNECT_S = 60.0
_SEND_TIMEOUT_S = 60.0  # of a receiver that takes no byte
_AT_ONCE_BYTES = 2**20  # the time of a socket is for a whole `sendall`: at 20 kB/s a receiver still takes bytes
TIMEOUT_S = 300.0  # of a sender that sends none, since it waits for its other receivers
_SECRET_S = 5.0
_MOST_WAITING = 64  # connections that have not shown the secret yet
_SIZE = struct.Struct("!I")
_MAX_HEADER_BYTES = 2**16


class TransferError(ConnectionError):
    """Weights did not get through a connection."""


class Receiver(Protocol):
    """A vLLM that takes weights.

    Attributes:
        num_workers: processes of the receiver, each of which connects and takes all weights.
    """

    num_workers: int

    @property
    def local_address(self) -> str:
        """The address of this machine by which the receiver reaches it."""
        ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Returns when the receiver has read all weights."""
        ...

    def finish_weight_update(self, weight_version: str) -> None: ...

    def abort(self) -> None:
        """Ends the calls that wait for an answer, with an error."""
        ...


def send_weights(pieces: Iterable[Piece], receivers: Sequence[Receiver], version: str) -> dict[int, Exception]:
    """Sends all pieces to all receivers.

    Args:
        pieces: read once, to the end, also if every receiver fails.
        receivers: are sent to at the same time.
        version: name of these weights.

    Returns:
        By the place of a receiver what its update failed with. A failure does not hold up the other receivers.
    """
    with ThreadPoolExecutor(2 * len(receivers), "weights") as threads:
        links = [_Link(receiver, threads) for receiver in receivers]
        try:
            _each(threads, links, _Link.open)
            for piece in pieces:
                content = _content(piece)
                _each(threads, links, lambda link, content=content: link.send(*content))
            _each(threads, links, lambda link: link.finish(version))
        except BaseException:  # Ctrl-C: threads must not wait for receivers
            for link in links:
                link.is_closed = True
                link.receiver.abort()
            raise
        finally:
            for link in links:
                link.close()
    return {place: link.failure for place, link in enumerate(links) if link.failure is not None}


def _each(threads: ThreadPoolExecutor, links: Sequence["_Link"], action: Any) -> None:
    """Does something with each link that has not failed, at the same time, and notes the failures."""

    def attempt(link: _Link) -> None:
        try:
            action(link)
        except Exception as error:
            link.fail(error)

    wait([threads.submit(attempt, link) for link in links if link.failure is None])


class _Link:
    """The connections to the workers of one receiver."""

    def __init__(self, receiver: Receiver, threads: ThreadPoolExecutor) -> None:
        self.receiver = receiver
        self.threads = threads
        self.connections: list[socket.socket] = []
        self.reading: Future[None] | None = None
        self.failure: Exception | None = None
        self.is_closed = False

    def open(self) -> None:
        self.receiver.start_weight_update()
        secret = secrets.token_hex(16)
        address = self.receiver.local_address
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener, _Door(listener, secret) as door:
            port = listener.getsockname()[1]
            info = {"address": address, "port": port, "secret": secret}
            self.reading = self.threads.submit(self.receiver.update_weights, info)
            deadline = time.monotonic() + _CONNECT_S
            while len(self.connections) < self.receiver.num_workers:
                if self.is_closed:
                    raise TransferError("the update was broken off")
                if self.reading.done():
                    self.reading.result()
                    raise TransferError("the receiver ended its update without taking the weights")
                if time.monotonic() > deadline:
                    raise TransferError(f"the receiver did not connect within {_CONNECT_S:g} s")
                self.connections += door.admit(timeout_s=0.2)
        for connection in self.connections:
            connection.settimeout(_SEND_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, header: bytes, data: memoryview) -> None:
        for connection in self.connections:
            connection.sendall(header)
            for start in range(0, len(data), _AT_ONCE_BYTES):
                connection.sendall(data[start : start + _AT_ONCE_BYTES])

    def finish(self, version: str) -> None:
        for connection in self.connections:
            connection.sendall(_SIZE.pack(0))
        assert self.reading is not None
        try:
            self.reading.result(TIMEOUT_S)
        except TimeoutError:
            raise TransferError(f"the receiver did not take the weights within {TIMEOUT_S:g} s") from None
        self.receiver.finish_weight_update(version)

    def fail(self, error: Exception) -> None:
        """The receiver's own reason, where it gives one soon, is better than a broken connection."""
        self.close()
        if self.reading is not None:
            wait([self.reading], timeout=5)
            if not self.reading.done():
                self.receiver.abort()
            elif isinstance(reason := self.reading.exception(), Exception):
                error = reason
        if isinstance(error, OSError) and not isinstance(error, TransferError):
            error = TransferError(f"the connection to the receiver broke: {error}")
        self.failure = error

    def close(self) -> None:
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that sends
            connection.close()
        self.connections = []


class _Door:
    """Lets in the connections that show the secret. None of the others holds it up."""

    def __init__(self, listener: socket.socket, secret: str) -> None:
        listener.setblocking(False)
        self.listener = listener
        self.secret = secret.encode()
        self.waiting: dict[socket.socket, tuple[float, bytearray]] = {}  # its deadline, and what it has shown
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self.waiting):
            self._release(connection).close()
        self.selector.close()

    def admit(self, timeout_s: float) -> list[socket.socket]:
        """Connections that have shown the secret by now. Waits for something to happen."""
        admitted = []
        for key, _ in self.selector.select(timeout_s):
            connection: Any = key.fileobj
            if connection is self.listener:
                self._accept()
            elif connection in self.waiting and self._shows_secret(connection):
                admitted.append(self._release(connection))
        late = [connection for connection, (deadline, _) in self.waiting.items() if time.monotonic() > deadline]
        for connection in late:
            self._release(connection).close()
        return admitted

    def _accept(self) -> None:
        with suppress(OSError):  # it may be gone
            connection = self.listener.accept()[0]
            connection.setblocking(False)
            if len(self.waiting) == _MOST_WAITING:
                self._release(next(iter(self.waiting))).close()
            self.waiting[connection] = time.monotonic() + _SECRET_S, bytearray()
            self.selector.register(connection, selectors.EVENT_READ)

    def _shows_secret(self, connection: socket.socket) -> bool:
        """Whether the whole secret has come. Closes a connection that shows something else."""
        shown = self.waiting[connection][1]
        try:
            more = connection.recv(len(self.secret) - len(shown))
        except OSError:
            more = b""
        shown += more
        is_whole = len(shown) == len(self.secret)
        if is_whole and secrets.compare_digest(shown, self.secret):
            return True
        if is_whole or not more:
            self._release(connection).close()
        return False

    def _release(self, connection: socket.socket) -> socket.socket:
        del self.waiting[connection]
        self.selector.unregister(connection)
        return connection


# ---- pieces ---------------------------------------------------------------------------------------------------------

_DTYPES = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and not name.startswith(("q", "bits"))  # whose tensors are no bytes
}


class _Header(Answer):
    """Of a piece, see `Piece`."""

    name: Annotated[str, Field(min_length=1)]
    dtype: str
    shape: Annotated[list[NonNegativeInt], Field(max_length=16)]
    offset: NonNegativeInt
    numel: NonNegativeInt


def _content(piece: Piece) -> tuple[bytes, memoryview]:
    data = piece.data.detach().cpu().contiguous()
    dtype = str(data.dtype).removeprefix("torch.")
    header = _Header(name=piece.name, dtype=dtype, shape=[*piece.shape], offset=piece.offset, numel=data.numel())
    packed = header.model_dump_json().encode()
    return _SIZE.pack(len(packed)) + packed, data.view(torch.uint8).numpy().data


def read_pieces(connection: socket.socket, secret: str) -> Iterator[Piece]:
    """The pieces that `send_weights` sends: all elements of each weight, and each once.

    Raises:
        TransferError: the stream broke off, or what arrives is no such piece.
    """
    seen = _Seen()
    try:
        connection.sendall(secret.encode())
        while size := _SIZE.unpack(_read(connection, _SIZE.size))[0]:
            if size > _MAX_HEADER_BYTES:
                raise TransferError(f"a header of {size} bytes: these are no weights")
            header = read_answer(_Header, bytes(_read(connection, size)))
            seen.add(header)
            data = _room_for(header)
            _read_into(connection, data.view(torch.uint8).numpy().data)
            yield Piece(header.name, tuple(header.shape), header.offset, data, borrowed=False)
    except AnswerError as error:
        raise TransferError(f"what arrives is no piece of a weight: {error}") from error
    except OSError as error:
        if isinstance(error, TransferError):
            raise
        raise TransferError(f"the connection to the sender of the weights broke: {error}") from error
    seen.require_all()


def _room_for(header: _Header) -> torch.Tensor:
    try:
        return torch.empty(header.numel, dtype=_DTYPES[header.dtype])
    except RuntimeError as error:
        raise TransferError(f"no memory for {header.numel} elements of {header.name}") from error


class _Seen:
    """Which elements of each weight have come."""

    def __init__(self) -> None:
        self.weights: dict[str, tuple[list[int], str, list[tuple[int, int]]]] = {}  # shape, dtype, spans in order

    def add(self, header: _Header) -> None:
        if header.dtype not in _DTYPES:
            raise TransferError(f"{header.name} has dtype {header.dtype:.40}, which no weight has")
        size = math.prod(header.shape)
        start, stop = header.offset, header.offset + header.numel
        if stop > size:
            raise TransferError(f"{header.name} has {size} elements, and those from {start} to {stop} come")
        shape, dtype, spans = self.weights.setdefault(header.name, (header.shape, header.dtype, []))
        if (shape, dtype) != (header.shape, header.dtype):
            raise TransferError(
                f"{header.name} is {dtype} {shape} in one piece and {header.dtype} {header.shape} in another"
            )
        place = bisect(spans, (start, stop))
        before, after = spans[place - 1 : place], spans[place : place + 1]
        if (
            before == [(start, stop)]
            or any(end > start for _, end in before)
            or any(begin < stop for begin, _ in after)
        ):
            raise TransferError(f"elements of {header.name} come twice")
        spans.insert(place, (start, stop))

    def require_all(self) -> None:
        for name, (shape, _, spans) in self.weights.items():
            if (count := sum(stop - start for start, stop in spans)) < math.prod(shape):
                raise TransferError(f"{name} has {math.prod(shape)} elements, and {count} came")


def _read(connection: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    _read_into(connection, buffer)
    return buffer


def _read_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        if not (count := connection.recv_into(buffer)):
            raise TransferError("the sender of the weights closed the connection before their end")
        buffer = buffer[count:]
