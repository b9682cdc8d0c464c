"""`rlft-fast bench --predict DEVICE [T,D,V ...]`: the head on a GPU that is not here, counted and then predicted.

The operators run with tensors that have shapes but no elements, so the counts are those of the real dispatch: GEMMs
with their shapes, bytes that each pass moves, launches, and operators that wait for the device. A table of device
figures turns the counts into milliseconds: a GEMM takes its products at the device's FLOP/s and its operands and result
at the device's bandwidth, and any other operator takes what it reads and writes. All reads count as reads of HBM, and
nothing overlaps. So a ratio to bare GEMMs, counted the same way, tells more than the milliseconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.support.document import fill, table

ROOT = Path(__file__).parents[2]
SHAPES = ((8192, 4096, 151936), (16384, 896, 151936), (8192, 2304, 256000))
Shape = tuple[int, int, int]  # T, D, V


class Device(NamedTuple):
    """Figures of a device, frozen: a prediction changes because the code does."""

    flops: float
    """FLOP/s that large bfloat16 GEMMs reach."""
    bandwidth: float
    """Bytes/s that a copy reaches."""
    launch_seconds: float
    """Time of the host for an operator of PyTorch."""


DEVICES = {
    "h200": Device(780e12, 4.3e12, 6e-6),  # frozen before anything ran on one
    "h100": Device(787e12, 3.03e12, 6e-6),  # measured: results/h100.md
}


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


# ---- a process with the pretended device -----------------------------------------------------------------------------


def count_ways(shapes: list[Shape]) -> Iterator[tuple[str, Shape, Counts]]:
    """Counts of all ways at all shapes, in a process that does nothing else."""
    import torch

    from benchmarks.ops.counting import Counting
    from benchmarks.ops.ways import ppo_clip
    from rlft_fast.ops import linear_logprob, linear_logprob_loss

    def problem(shape: Shape, frozen: bool) -> tuple[Any, ...]:
        tokens, dim, vocab = shape
        hidden = torch.empty(tokens, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocab, dim, device="cuda", dtype=torch.bfloat16, requires_grad=not frozen)
        target, index = (torch.empty(tokens, device="cuda", dtype=torch.int64) for _ in range(2))
        return hidden, weight, target, index, torch.empty(tokens, device="cuda")

    def runs(way: str, shape: Shape) -> Callable[[], object]:
        hidden, weight, target, index, per_token = problem(shape, frozen=way == "frozen weight")
        options = {"active_index": index, "backend": "native"}
        if way == "loss":
            return lambda: linear_logprob_loss(
                hidden, weight, target, ppo_clip, per_token, per_token, **options
            ).loss.backward()
        if way == "no grad":
            return torch.no_grad()(lambda: linear_logprob(hidden, weight, target, **options))
        return lambda: linear_logprob(hidden, weight, target, **options).logprob.backward(per_token)

    with Counting() as mode:
        for shape in shapes:
            for way in WAYS:
                run = runs(way, shape)
                mode.counts = Counts()
                run()
                yield way, shape, mode.counts


def counted(shapes: list[Shape]) -> dict[tuple[str, Shape], Counts]:
    """`count_ways` in a process of its own, whose torch believes in a GPU."""
    import torch

    environment = dict(os.environ)
    if torch.version.cuda is None:
        from benchmarks.support.device_library import device_library

        environment["RLFT_EMULATED_KERNELS"] = str(device_library(ROOT / "build/predict"))
    command = [sys.executable, "-m", "benchmarks.ops.counting", *(",".join(map(str, shape)) for shape in shapes)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"counting failed: {done.stderr.strip()[-2000:]}")
    found = {}
    for line in done.stdout.splitlines():
        row = json.loads(line)
        gemms = Counter({Gemm(*gemm): n for gemm, n in row["gemms"]})
        counts = Counts(gemms, Counter(row["bytes"]), row["launches"], row["waits"])
        found[row["way"], tuple(row["shape"])] = counts
    return found


# ---- the report ------------------------------------------------------------------------------------------------------

METHOD = """PREDICTED, not measured: the operators ran with tensors that have shapes but no elements, so that GEMMs,
bytes, launches and waits are those of the real dispatch (backend "native", bfloat16, the loss of PPO, all tokens
active). A GEMM takes its products at {tflops:g} TFLOP/s and the bytes of its operands and result at {bandwidth:g}
TB/s. Any other operator takes what it reads and writes, all of it from HBM; nothing overlaps. A launch takes the host
{launch:g} microseconds; where the host takes longer than the device, its time counts. The ratio is to bare bfloat16
GEMMs by the same rules, as many as the way needs at least: 1 without a gradient, 4, 2 with a frozen weight, 3 in the
loss. "products" counts multiplications in units of T D V; "bytes per logit" is what other operators than GEMMs move."""


def report(name: str, found: dict[tuple[str, Shape], Counts]) -> str:
    """Markdown: a table of all ways, and one of the passes that move most."""
    device = DEVICES[name]
    rows, passes = [], []
    for (way, shape), counts in found.items():
        floor, key = bare(shape, WAYS[way]), f"{way}, {' x '.join(map(str, shape))}"
        rows.append((
            key, f"{counts.products(shape):.2f}", f"{counts.bytes_per_logit(shape):.1f}", str(counts.launches),
            str(len(counts.waits)), f"{1e3 * counts.host_seconds(device):.1f}",
            f"{1e3 * counts.device_seconds(device):.1f}", f"{counts.ratio(device, floor):.2f}",
        ))  # fmt: skip
        most = counts.bytes.most_common(4)
        passes.append((key, ", ".join(f"{re.sub('.*::', '', op)} {size / 1e9:.2f}" for op, size in most)))
    header = ("way, T x D x V", "products", "bytes per logit", "launches", "waits", "host ms", "device ms", "ratio")
    method = METHOD.format(
        tflops=device.flops / 1e12, bandwidth=device.bandwidth / 1e12, launch=1e6 * device.launch_seconds
    )
    sections = [
        f"# Predictions for {name.upper()}", fill(method.replace("\n", " ")), table(header, rows),
        "Operators that move most, in GB:", table(("way, T x D x V", "operators"), passes),
    ]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def parse_shape(text: str) -> Shape:
    if not re.fullmatch(r"[1-9]\d{0,8},[1-9]\d{0,8},[1-9]\d{0,8}", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected tokens,hidden,vocabulary, such as 8192,4096,151936")
    tokens, dim, vocab = map(int, text.split(","))
    return tokens, dim, vocab


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="rlft-fast bench --predict", description=(__doc__ or "").split("\n\n")[1])
    parser.add_argument("device", choices=DEVICES)
    parser.add_argument("shapes", nargs="*", type=parse_shape, metavar="T,D,V", help="tokens, hidden size, vocabulary")
    parser.add_argument("--output", type=Path, help="folder for predict-DEVICE.md and predict-DEVICE.json")
    args = parser.parse_args(arguments)
    found = counted(args.shapes or [*SHAPES])
    text = report(args.device, found)
    print(text, end="")
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        (args.output / f"predict-{args.device}.md").write_text(text)
        raw = [
            {"way": way, "shape": shape, "gemms": [[*gemm._asdict().values(), n] for gemm, n in counts.gemms.items()],
             "bytes": counts.bytes, "launches": counts.launches, "waits": counts.waits}
            for (way, shape), counts in found.items()
        ]  # fmt: skip
        (args.output / f"predict-{args.device}.json").write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
