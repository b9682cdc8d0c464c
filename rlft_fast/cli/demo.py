"""``rlft-fast demo``: teaches a small model to add, in minutes on a CPU."""

import argparse

from rlft_fast.cli.parser import Parser, path
from rlft_fast.cli.train import require_writable


def run(arguments: list[str]) -> int:
    parser = Parser(prog="rlft-fast demo", description="Teach SmolLM2-135M-Instruct to add two numbers.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument(
        "--output", dest="output_dir", metavar="DIR", type=path, default="runs/demo",
        help="folder to write (default: runs/demo)",
    )  # fmt: skip
    parser.add_argument("--rollout", choices=("hf", "vllm"), default="hf", help="generator (default: hf)")
    parser.add_argument("--steps", type=int, default=argparse.SUPPRESS, help="number of steps (default: 28)")
    parser.add_argument("--ray", action="store_true", help="train in two workers on Ray")
    options = parser.parse_args(arguments)
    require_writable(options.output_dir)
    from rlft_fast.demo import learn_sums

    learn_sums(**vars(options))
    return 0
