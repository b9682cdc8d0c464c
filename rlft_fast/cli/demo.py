"""``rlft-fast demo``: teaches a small model to add or to use a calculator, in minutes on a CPU."""

import argparse
from pathlib import Path
from typing import Any

from rlft_fast.cli.parser import Parser, path
from rlft_fast.cli.train import require_writable


def run(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlft-fast demo",
        description="Teach SmolLM2-135M-Instruct to add two numbers, or to use a calculator in several turns.",
    )
    parser.add_argument(
        "task", nargs="?", choices=("sums", "tools"), default="sums",
        help="sums, or tools: a warm-up by supervised fine-tuning, then episodes with a calculator (default: sums)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument(
        "--output", dest="output_dir", metavar="DIR", type=path, default=None,
        help="folder to write (default: runs/demo, or runs/demo-tools)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=argparse.SUPPRESS, help="number of steps (default: 28, or 12)")
    sums = parser.add_argument_group("of sums")
    sums.add_argument(
        "--rollout", choices=("hf", "vllm"), default=argparse.SUPPRESS, help="generator (default: hf)"
    )  # fmt: skip
    sums.add_argument("--ray", action="store_true", default=argparse.SUPPRESS, help="train in two workers on Ray")
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    task = options.pop("task")
    output = options["output_dir"] or Path({"sums": "runs/demo", "tools": "runs/demo-tools"}[task])
    if task == "tools" and (given := [name for name in ("rollout", "ray") if name in options]):
        parser.error(f"--{given[0]} is an option of the task sums: leave it out")
    require_writable(output)
    from rlft_fast import demo

    learn = demo.learn_sums if task == "sums" else demo.learn_tools
    learn(**options | {"output_dir": output})
    return 0
