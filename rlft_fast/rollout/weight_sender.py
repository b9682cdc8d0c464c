"""Sends a stream of weights through sockets, once for any number of receivers, on this machine or on others.

    sender:   listens -> update_weights(address, secret) -> sends each piece to all -> finish_weight_update(version)
    receiver: connects, shows the secret -> reads the pieces

A piece is the size of its header, the header in JSON, and its bytes. Nothing is unpickled, and a connection that does
not know the secret is closed.
"""

import json
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Protocol

import torch

from rlft_fast.engine import Piece

_SEND_TIMEOUT_S = 60.0  # of a receiver that takes no byte
TIMEOUT_S = 300.0  # of a sender that sends none, since it waits for its other receivers
_SECRET_S = 5.0
_SIZE = struct.Struct("!I")
_MAX_HEADER_BYTES = 2**16


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
        with socket.create_server((address, 0), family=family) as listener:
            port = listener.getsockname()[1]
            info = {"address": address, "port": port, "secret": secret}
            self.reading = self.threads.submit(self.receiver.update_weights, info)
            listener.settimeout(0.2)
            deadline = time.monotonic() + TIMEOUT_S
            while len(self.connections) < self.receiver.num_workers:
                if self.is_closed:
                    raise RuntimeError("the update was broken off")
                if self.reading.done():
                    self.reading.result()
                    raise RuntimeError("the receiver ended its update without taking the weights")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the receiver did not connect within {TIMEOUT_S:g} s")
                with suppress(TimeoutError):
                    self._admit(listener.accept()[0], secret)

    def _admit(self, connection: socket.socket, secret: str) -> None:
        connection.settimeout(_SECRET_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            shown = bytes(_read(connection, len(secret)))
        except (OSError, EOFError):
            shown = b""
        if secrets.compare_digest(shown, secret.encode()):
            connection.settimeout(_SEND_TIMEOUT_S)
            self.connections.append(connection)
        else:
            connection.close()

    def send(self, header: bytes, data: memoryview) -> None:
        for connection in self.connections:
            connection.sendall(header)
            connection.sendall(data)

    def finish(self, version: str) -> None:
        for connection in self.connections:
            connection.sendall(_SIZE.pack(0))
        assert self.reading is not None
        self.reading.result()
        self.receiver.finish_weight_update(version)

    def fail(self, error: Exception) -> None:
        """The receiver's own reason, where it gives one soon, is better than a broken connection."""
        self.close()
        if self.reading is not None:
            wait([self.reading], timeout=5)
            if self.reading.done() and (reason := self.reading.exception()) is not None:
                error = reason if isinstance(reason, Exception) else error
        self.failure = error

    def close(self) -> None:
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that sends
            connection.close()
        self.connections = []


def _content(piece: Piece) -> tuple[bytes, memoryview]:
    data = piece.data.detach().cpu().contiguous()
    dtype = str(data.dtype).removeprefix("torch.")
    header = json.dumps([piece.name, dtype, list(piece.shape), piece.offset, data.numel()]).encode()
    return _SIZE.pack(len(header)) + header, data.view(torch.uint8).numpy().data


def read_pieces(connection: socket.socket, secret: str) -> Iterator[Piece]:
    """The pieces that `send_weights` sends.

    Raises:
        EOFError: the sender closed the connection before the end.
        ValueError: what arrives is no piece.
    """
    connection.sendall(secret.encode())
    while size := _SIZE.unpack(_read(connection, _SIZE.size))[0]:
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes: these are no weights")
        name, dtype_name, shape, offset, numel = json.loads(bytes(_read(connection, size)))
        dtype = getattr(torch, dtype_name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"weights of dtype {dtype_name}")
        data = torch.empty(numel, dtype=dtype)
        _read_into(connection, data.view(torch.uint8).numpy().data)
        yield Piece(name, tuple(shape), offset, data, borrowed=False)


def _read(connection: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    _read_into(connection, buffer)
    return buffer


def _read_into(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        if not (count := connection.recv_into(buffer)):
            raise EOFError("the sender of the weights closed the connection")
        buffer = buffer[count:]
