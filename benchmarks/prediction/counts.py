"""What one call of the head does on a device: GEMMs, bytes that each pass moves, launches and waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

Shape = tuple[int, int, int]  # T, D, V


class Device(NamedTuple):
    """Figures of a device, frozen: a prediction changes because the code does."""

    flops: float
    """FLOP/s that large bfloat16 GEMMs reach."""
    bandwidth: float
    """Bytes/s that a copy reaches."""
    launch_seconds: float
    """Time of the host for an operator of PyTorch."""


class Gemm(NamedTuple):
    """``(rows, inner) @ (inner, columns)``, and the bytes of an element of the operands and of the result."""

    rows: int
    inner: int
    columns: int
    in_bytes: int
    out_bytes: int
    accumulates: bool = False

    @property
    def products(self) -> int:
        return self.rows * self.inner * self.columns

    @property
    def bytes(self) -> int:
        operands = self.in_bytes * (self.rows * self.inner + self.inner * self.columns)
        return operands + self.out_bytes * self.rows * self.columns * (1 + self.accumulates)

    def seconds(self, device: Device) -> float:
        return 2 * self.products / device.flops + self.bytes / device.bandwidth


@dataclass
class Counts:
    """What one call does."""

    gemms: Counter[Gemm] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    """Of every other operator, by its name."""
    launches: int = 0
    waits: list[str] = field(default_factory=list)

    def products(self, shape: Shape) -> float:
        """In units of T·D·V."""
        tokens, dim, vocab = shape
        return sum(gemm.products * n for gemm, n in self.gemms.items()) / (tokens * dim * vocab)

    def bytes_per_logit(self, shape: Shape) -> float:
        """Moved by other operators than GEMMs."""
        tokens, _, vocab = shape
        return sum(self.bytes.values()) / (tokens * vocab)

    def device_seconds(self, device: Device) -> float:
        gemms = sum(gemm.seconds(device) * n for gemm, n in self.gemms.items())
        return gemms + sum(self.bytes.values()) / device.bandwidth

    def host_seconds(self, device: Device) -> float:
        return self.launches * device.launch_seconds

    def ratio(self, device: Device, floor: Counts) -> float:
        """To bare GEMMs; the slower of device and host counts."""
        return max(self.device_seconds(device), self.host_seconds(device)) / floor.device_seconds(device)


def bare(shape: Shape, which: str) -> Counts:
    """GEMMs alone, in bfloat16: "z" makes the logits, "x" dX and "w" dW."""
    tokens, dim, vocab = shape
    gemms = {
        "z": Gemm(tokens, dim, vocab, 2, 2), "x": Gemm(tokens, vocab, dim, 2, 2), "w": Gemm(vocab, tokens, dim, 2, 2)
    }  # fmt: skip
    return Counts(Counter(gemms[name] for name in which), launches=len(which))


WAYS = {"no grad": "z", "forward + backward": "zzxw", "frozen weight": "zx", "loss": "zxw"}  # and their floors
