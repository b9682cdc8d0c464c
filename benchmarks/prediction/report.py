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
from pathlib import Path

from benchmarks.prediction.counts import WAYS, Counts, Device, Gemm, Shape, bare
from benchmarks.support.document import fill, table

ROOT = Path(__file__).parents[2]
SHAPES = ((8192, 4096, 151936), (16384, 896, 151936), (8192, 2304, 256000))
DEVICES = {
    "h200": Device(780e12, 4.3e12, 6e-6),  # frozen before anything ran on one
    "h100": Device(787e12, 3.03e12, 6e-6),  # measured: results/h100.md
}


def counted(shapes: list[Shape]) -> dict[tuple[str, Shape], Counts]:
    """Counts of all ways at all shapes, by `benchmarks.prediction.counting`: its process believes in a GPU."""
    import torch

    environment = dict(os.environ)
    if torch.version.cuda is None:
        from benchmarks.support.device_library import device_library

        environment["RLFT_EMULATED_KERNELS"] = str(device_library(ROOT / "build/predict"))
    command = [sys.executable, "-m", "benchmarks.prediction.counting", *(",".join(map(str, shape)) for shape in shapes)]
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
