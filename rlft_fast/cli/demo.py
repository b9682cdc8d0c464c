"""``rlft-fast demo``: a real model learns a real task while one watches."""

from pathlib import Path

from rlft_fast.cli.parser import Parser
from rlft_fast.cli.train import require_writable


def run(arguments: list[str]) -> int:
    parser = Parser(prog="rlft-fast demo", description="Fine-tune SmolLM2-135M-Instruct on sums.")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument("--output", metavar="DIR", default="runs/demo", help="folder to write (default: runs/demo)")
    parser.add_argument(
        "--rollout", choices=("hf", "vllm"), help="what generates (default: vllm where installed, which is faster)"
    )
    options = parser.parse_args(arguments)
    require_writable(Path(options.output))
    from rlft_fast import demo

    demo.main(seed=options.seed, output_dir=options.output, rollout=options.rollout)
    return 0
