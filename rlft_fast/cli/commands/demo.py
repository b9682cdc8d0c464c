"""``rlft-fast demo``: teaches a small model to add, to use a calculator or to see, in minutes on a CPU."""

import argparse
from pathlib import Path
from typing import Any

from rlft_fast.cli.commands.train import require_writable
from rlft_fast.cli.parser import Parser, path

_FOLDERS = {"sums": "runs/demo", "tools": "runs/demo-tools", "images": "runs/demo-images"}


def run(arguments: list[str]) -> int:
    parser = Parser(
        prog="rlft-fast demo",
        description="Teach SmolLM2-135M-Instruct to add two numbers, or to use a calculator in several turns; or teach "
        "a small vision-language model of random weights to tell colours and shapes.",
    )
    parser.add_argument(
        "task", nargs="?", choices=(*_FOLDERS,), default="sums",
        help="sums; tools: a warm-up by supervised fine-tuning, then episodes with a calculator; or images: a warm-up "
        "on texts, then questions about pictures (default: sums)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument(
        "--output", dest="output_dir", metavar="DIR", type=path, default=None,
        help="folder to write (default: runs/demo, runs/demo-tools or runs/demo-images)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=argparse.SUPPRESS, help="number of steps (default: 28, 8 or 100)")
    sums = parser.add_argument_group("of sums")
    sums.add_argument(
        "--rollout", choices=("hf", "vllm"), default=argparse.SUPPRESS, help="generator (default: hf)"
    )  # fmt: skip
    sums.add_argument("--ray", action="store_true", default=argparse.SUPPRESS, help="train in two workers on Ray")
    options: dict[str, Any] = vars(parser.parse_args(arguments))
    task = options.pop("task")
    output = options["output_dir"] or Path(_FOLDERS[task])
    if task != "sums" and (given := [name for name in ("rollout", "ray") if name in options]):
        parser.error(f"--{given[0]} is an option of the task sums: leave it out")
    require_writable(output)
    from rlft_fast import demo

    learn = {"sums": demo.learn_sums, "tools": demo.learn_tools, "images": demo.learn_images}
    learn[task](**options | {"output_dir": output})
    return 0
