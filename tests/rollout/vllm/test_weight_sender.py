"""Weights through sockets, with senders and receivers that are none: one kind of error, and nobody is held up."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlft_fast.engine import Piece
from rlft_fast.rollout.vllm import weight_sender
from rlft_fast.rollout.vllm.weight_sender import TransferError, read_pieces, send_weights

SECRET = "0123456789abcdef"
END = struct.pack("!I", 0)


def pieces() -> list[Piece]:
    """Of a weight in three pieces out of order, of one in one piece, and of one without elements."""
    whole = torch.arange(6, dtype=torch.bfloat16)
    cut = [Piece("a", (2, 3), i, whole[i : i + n], borrowed=True) for i, n in ((4, 2), (0, 1), (1, 3))]
    return [*cut, Piece("b", (), 0, torch.ones(1), borrowed=True), Piece("c", (0, 4), 0, torch.ones(0), borrowed=True)]


def framed(content: bytes, data: bytes = b"") -> bytes:
    return struct.pack("!I", len(content)) + content + data


def piece(**changes: Any) -> bytes:
    """An honest piece of a whole weight, with changes of its header."""
    header = {"name": "w", "dtype": "float32", "shape": [2], "offset": 0, "numel": 2} | changes
    size = 4 * header["numel"] if isinstance(header["numel"], int) and 0 <= header["numel"] < 100 else 8
    return framed(json.dumps(header).encode(), b"\0" * size)


def read(sent: bytes) -> list[Piece]:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        sender.sendall(sent)
        sender.shutdown(socket.SHUT_WR)
        return list(read_pieces(receiver, SECRET))


HALF = {"shape": [4], "numel": 2}
WRONG = {
    "cut in a size": (b"\0\0", "closed the connection before their end"),
    "cut in a header": (piece()[:9], "closed the connection before"),
    "cut in the data": (piece()[:-3], "closed the connection before"),
    "no end": (piece(), "closed the connection before"),
    "a long header": (struct.pack("!I", 2**31), "a header of 2147483648 bytes"),
    "no JSON": (framed(b"GET / "), "no piece of a weight: Invalid JSON"),
    "null": (framed(b"null"), "an object, got None"),
    "a list": (framed(b"[1]"), r"an object, got \[1\]"),
    "deep": (framed(b"[" * 60_000), "recursion limit"),
    "no text": (framed(b"\xff\xfe"), "Invalid JSON"),
    "no shape": (framed(b'{"name": "w", "dtype": "float32"}'), "shape: Field required"),
    **{f"dtype {x!r}": (piece(dtype=x), "dtype: .*string, got") for x in (5, None)},
    **{f"dtype {x}": (piece(dtype=x), f"w has dtype {x}, which no weight") for x in ("nn", "f", "quint8", "__doc__")},
    **{f"name {x!r}": (piece(name=x), "name: ") for x in (5, "", None)},
    **{f"shape {x!r}": (piece(shape=x), "shape") for x in ("22", [-2], [[2]], [2.0], [True], [1] * 17, None)},
    **{f"numel {x!r}": (piece(numel=x), "numel: ") for x in (-2, "2", 2.0, None)},
    "offset -1": (piece(offset=-1), "offset: .*greater than or equal to 0"),
    "beyond the shape": (piece(offset=1), "w has 2 elements, and those from 1 to 3 come"),
    "far beyond": (piece(offset=10**30), "w has 2 elements"),
    "more than the shape": (piece(numel=10**30), "w has 2 elements"),
    "more than memory": (piece(shape=[2**55], numel=2**55), "no memory for 36028797018963968 elements of w"),
    "twice": (piece() + piece() + END, "elements of w come twice"),
    "nothing twice": (piece(shape=[0], numel=0) * 2 + END, "elements of w come twice"),
    "an overlap": (piece(**HALF) + piece(**HALF, offset=1) + END, "elements of w come twice"),
    "an overlap before": (piece(**HALF, offset=1) + piece(**HALF) + END, "elements of w come twice"),
    "a half": (piece(**HALF) + END, "w has 4 elements, and 2 came"),
    "two shapes": (piece(**HALF) + piece(**HALF | {"shape": [2, 2]}, offset=2), r"w is float32 \[4\] in one piece and"),
    "two dtypes": (piece(**HALF) + piece(**HALF, offset=2, dtype="int32"), "and int32 "),
}


@pytest.mark.parametrize(("sent", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_stream_of_weights(sent, message):
    with pytest.raises(TransferError, match=message):
        read(sent)


class Receiving:
    """A receiver, whose connections an attack precedes."""

    local_address = "127.0.0.1"
    num_workers = 2

    def __init__(self, attack: Callable[[tuple[str, int]], Any] = lambda address: None) -> None:
        self.attack = attack
        self.version: str | None = None
        self.received: list[list[Piece]] = []

    def start_weight_update(self) -> None: ...

    def abort(self) -> None: ...

    def update_weights(self, info: dict[str, Any]) -> None:
        address = info["address"], info["port"]
        held = self.attack(address)
        with ThreadPoolExecutor() as threads:
            self.received = list(threads.map(lambda _: self.read(address, info["secret"]), range(self.num_workers)))
        del held

    def read(self, address: tuple[str, int], secret: str) -> list[Piece]:
        with socket.create_connection(address, 10) as connection:
            return list(read_pieces(connection, secret))

    def finish_weight_update(self, version: str) -> None:
        self.version = version


def silent(address: tuple[str, int]) -> list[socket.socket]:
    return [socket.create_connection(address) for _ in range(100)]


def drip(address: tuple[str, int]) -> socket.socket:
    connection = socket.create_connection(address)

    def send() -> None:
        with connection, contextlib.suppress(OSError):
            for _ in range(16):
                connection.send(b"0")
                time.sleep(0.1)

    threading.Thread(target=send, daemon=True).start()
    return connection


def guess(address: tuple[str, int]) -> None:
    for shown in (b"", b"0", b"0" * 32, b"0" * 10_000):
        with socket.create_connection(address) as connection:
            connection.sendall(shown)


@pytest.mark.parametrize("attack", [lambda address: None, silent, drip, guess], ids=["none", "silent", "drip", "guess"])
def test_other_connections_hold_up_nothing(attack):
    receivers = [Receiving(attack), Receiving()]
    started = time.monotonic()
    assert send_weights(pieces(), receivers, "run:1") == {}
    assert time.monotonic() - started < 4  # before: 5 s for each that is silent, and as long for each byte that drips
    for receiver in receivers:
        assert receiver.version == "run:1"
        for got in receiver.received:
            for one, sent in zip(got, pieces(), strict=True):
                assert one[:3] == sent[:3]
                assert torch.equal(one.data, sent.data)


@pytest.mark.parametrize("byte_s", [0.05, 9.0], ids=["drip", "silent"])
def test_the_secret_has_a_time_in_all(monkeypatch, byte_s):
    monkeypatch.setattr(weight_sender, "_SECRET_S", 0.3)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        weight_sender._Door(listener, SECRET) as door,
        socket.create_connection(listener.getsockname()) as guest,
    ):
        while not door.waiting:
            door.admit(0.01)
        started = last = time.monotonic()
        while door.waiting and time.monotonic() - started < 5:
            if time.monotonic() - last > byte_s:
                guest.send(SECRET[:1].encode())
                last = time.monotonic()
            assert door.admit(0.01) == []
        assert 0.25 < time.monotonic() - started < 2


@pytest.mark.parametrize("takes", [True, False], ids=["slow", "silent"])
def test_a_receiver_has_time_while_it_takes_bytes(monkeypatch, takes):
    """A slow one needs far longer for the weight than a silent one is waited for."""

    class Slow(Receiving):
        num_workers = 1

        def read(self, address: tuple[str, int], secret: str) -> list[Piece]:
            with socket.create_connection(address, 10) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
                connection.sendall(secret.encode())
                with connection.makefile("rb") as file, contextlib.suppress(ConnectionError):
                    file.read(struct.unpack("!I", file.read(4))[0])  # the header
                    left = weight.numel()
                    while takes and left and (found := file.read1(min(left, 2**17))):
                        left -= len(found)
                        time.sleep(0.005)
                    time.sleep(0 if takes else 1)
                    file.read(len(END))
            return []

    monkeypatch.setattr(weight_sender, "_SEND_TIMEOUT_S", 0.4)
    weight = torch.zeros(12 * 2**20, dtype=torch.uint8)
    started = time.monotonic()
    failures = send_weights([Piece("w", (weight.numel(),), 0, weight, borrowed=True)], [Slow()], "run:1")
    assert [str(failure) for failure in failures.values()] == (
        [] if takes else ["the connection to the receiver broke: timed out"]
    )
    assert time.monotonic() - started > 0.4


def test_a_receiver_that_breaks_off(monkeypatch):
    """Its own reason is told where it gives one; the other receiver takes the weights."""

    class Leaving(Receiving):
        def read(self, address: tuple[str, int], secret: str) -> list[Piece]:
            with socket.create_connection(address, 10) as connection:
                next(read_pieces(connection, secret))
                raise TransferError("no room")

    class Refusing(Receiving):
        def update_weights(self, info: dict[str, Any]) -> None:
            """Takes no weights."""

    monkeypatch.setattr(weight_sender, "_CONNECT_S", 0.5)
    never = Receiving(lambda address: time.sleep(1))
    failures = send_weights(pieces(), [Leaving(), Receiving(), Refusing(), never], "run:1")
    assert {place: type(error) for place, error in failures.items()} == dict.fromkeys((0, 2, 3), TransferError)
    assert [str(failures[0]), str(failures[2])] == [
        "no room",
        "the receiver ended its update without taking the weights",
    ]
